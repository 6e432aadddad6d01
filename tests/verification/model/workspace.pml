/* The protocol of symm_mem/workspace.py: buffers, epochs, `done`, and growth with deferred release.

   Every rank makes the same CALLS calls. Which buffer each takes, and before which of them the workspace grows, is
   chosen at the start in all ways. In each call a pusher (copy engine, a kernel's stores) sends to every
   peer while the rank itself waits for what comes, reads it, and leaves the buffer; it may leave before its own pushes
   are over. The next call begins after both.

   A store into another rank's memory is under way for any time, and stores overtake each other, but for what release
   and acquire forbid: a flag does not arrive before its data. `Wire` delivers them.

   With LL_PROTOCOL there are no flags: data that is 0 has not come, each chunk for itself, and a rank puts the zeros back
   before it leaves.

   Data is the number of the call that sent it. Reading anything else is an overwrite of unread data, or a flag ahead
   of its data. A rank that waits for ever is an invalid end state.

   W ranks, CALLS, CHUNKS of a shard, GROWTHS of the workspace at most. Three ranks with memory used again are too much for
   all of it: BUFFERS=1 is one buffer for all calls, ALWAYS_GROW grows before the first calls that may, and with PROMPT data
   and flags of a rank reach all peers at once, while `done` travels for any time. Data and flags of an old use of the memory have arrived
   everywhere before a growth is over, as all have come to it; `done` may not, of which only that of memory used more than
   once is ever looked at: that of block 1 comes at once, too. What must fail is named BREAK_...:
   BREAK_REUSE      nobody waits until a buffer is free        BREAK_REUSE_LATE  one use too few is waited for
   BREAK_FLAG       a flag overtakes its data                BREAK_DONE        `done` is said before the data is read
   BREAK_LOST_DONE  `done` is not told to one peer           BREAK_QUIESCE     memory is given up with stores under way
   BREAK_AGREE      memory is used again though a rank has not dropped it
   BREAK_ZEROED     a new workspace is used before all ranks have zeroed their words
   BREAK_KEPT       no zeros are put back                    BREAK_EMPTIED     they are, but `done` is said before */

#if W != 2 && W != 3
#error "W: must be 2 or 3"
#endif

#ifndef BUFFERS
#define BUFFERS 2
#endif

#define BLOCKS (GROWTHS + 1)
#define PLACES (W * BLOCKS * BUFFERS * W)
#define AT(owner, block, buffer, writer) ((((owner) * BLOCKS + (block)) * BUFFERS + (buffer)) * W + (writer))
#define WRITER(i) ((i) % W)
#define OWNER(i) ((i) / (W * BUFFERS * BLOCKS))

byte buffer_of[CALLS];
bool grow_at[CALLS];

byte epoch[W * BLOCKS * BUFFERS];  /* own words of each rank */
byte done_at[PLACES];           /* at the owner, written by the writer */
byte flag[PLACES * CHUNKS];
byte data[PLACES * CHUNKS];
byte done_sent[PLACES];      /* stores under way; 0 is none */
byte flag_sent[PLACES * CHUNKS];
byte data_sent[PLACES * CHUNKS];
byte under_way[W];           /* how many, by writer */

byte pushing[W], pushed[W];  /* calls whose pushes were begun, are over */
byte block_of[W], use_of[W];
byte met[W];                 /* how often a rank has come to the store */
byte posted[W];              /* bits: blocks that a rank has dropped */
bool started;

#define ALL_CAME(n) (met[0] >= (n) && met[1] >= (n) && met[W - 1] >= (n))

#ifdef BREAK_FLAG
#define FLAG_MAY_COME(i) flag_sent[i]
#else
#define FLAG_MAY_COME(i) (flag_sent[i] && !data_sent[i])
#endif
#ifdef BREAK_LOST_DONE
#define TOLD(peer) (peer != me && (me != 0 || peer != 1))
#else
#define TOLD(peer) (peer != me)
#endif

proctype Wire(byte i) {
    byte c;
end:
    do
    :: atomic { done_sent[i] -> done_at[i] = done_sent[i]; done_sent[i] = 0; under_way[WRITER(i)]-- }
#ifndef PROMPT
    :: atomic { data_sent[i * CHUNKS] ->
        data[i * CHUNKS] = data_sent[i * CHUNKS]; data_sent[i * CHUNKS] = 0; under_way[WRITER(i)]-- }
    :: atomic { FLAG_MAY_COME(i * CHUNKS) -> flag[i * CHUNKS] = flag_sent[i * CHUNKS]; flag_sent[i * CHUNKS] = 0; under_way[WRITER(i)]-- }
#endif
#if CHUNKS > 1 && !defined(PROMPT)
    :: atomic { data_sent[i * CHUNKS + 1] ->
        data[i * CHUNKS + 1] = data_sent[i * CHUNKS + 1]; data_sent[i * CHUNKS + 1] = 0; under_way[WRITER(i)]-- }
    :: atomic { FLAG_MAY_COME(i * CHUNKS + 1) ->
        flag[i * CHUNKS + 1] = flag_sent[i * CHUNKS + 1]; flag_sent[i * CHUNKS + 1] = 0; under_way[WRITER(i)]-- }
#endif
    od
}

/* A word has one writer and is never sent again while it is under way: its last store was seen to arrive. */
inline send(there, value) {
    if
    :: there == 0 -> under_way[me]++
    :: else
    fi;
    there = value
}

#ifdef LL_PROTOCOL
#define send_flag(there) skip
#define set_flag(there) skip
#else
#define send_flag(there) send(there, use_of[me])
#define set_flag(there) there = use_of[me]
#endif

#if defined(BREAK_REUSE)
#define FREE(peer) true
#elif defined(BREAK_REUSE_LATE)
#define FREE(peer) (done_at[AT(me, block_of[me], buffer_of[k], peer)] + 2 >= use_of[me])
#else
#define FREE(peer) (done_at[AT(me, block_of[me], buffer_of[k], peer)] + 1 >= use_of[me])
#endif
#define PEER ((me + W - step) % W)

proctype Pusher(byte me) {
    byte k, c, place;
    byte step = 1;
    do
    :: k == CALLS -> break
    :: k < CALLS ->
        atomic {
#ifdef PROMPT
            (pushing[me] > k && FREE((me + 1) % W) && FREE((me + W - 1) % W));
            do
            :: step < W ->
                place = AT(PEER, block_of[me], buffer_of[k], me) * CHUNKS;
                for (c : 0 .. (CHUNKS - 1)) { data[place + c] = k + 1; set_flag(flag[place + c]) }
                step++
            :: else -> break
            od;
            c = 0; place = 0; step = 1; k++; pushed[me]++
#else
            (pushing[me] > k && FREE(PEER));
            place = AT(PEER, block_of[me], buffer_of[k], me);
            do
            :: c < CHUNKS ->
                send(data_sent[place * CHUNKS + c], k + 1);
                send_flag(flag_sent[place * CHUNKS + c]);
                c++
            :: else -> break
            od;
            c = 0; place = 0;
            step++;
            if
            :: step == W -> step = 1; k++; pushed[me]++
            :: else
            fi
#endif
        }
    od
}

inline check_all() {
    for (src : 0 .. (W - 1)) {
        for (c : 0 .. (CHUNKS - 1)) {
            assert(src == me || data[AT(me, b, h, src) * CHUNKS + c] == k + 1)
        }
    }
    src = 0; c = 0
}

inline empty_all() {
#if defined(LL_PROTOCOL) && !defined(BREAK_KEPT)
    for (src : 0 .. (W - 1)) {
        for (c : 0 .. (CHUNKS - 1)) { data[AT(me, b, h, src) * CHUNKS + c] = 0 }
    }
    src = 0; c = 0
#else
    skip
#endif
}

inline leave() {
    epoch[(me * BLOCKS + b) * BUFFERS + h] = use_of[me];
    done_at[AT(me, b, h, me)] = use_of[me];
    peer = 0;
    do
    :: peer < W ->
        if
#ifdef PROMPT
        :: TOLD(peer) && b == 1 -> done_at[AT(peer, b, h, me)] = use_of[me]
        :: TOLD(peer) && b != 1 -> send(done_sent[AT(peer, b, h, me)], use_of[me])
#else
        :: TOLD(peer) -> send(done_sent[AT(peer, b, h, me)], use_of[me])
#endif
        :: else
        fi;
        peer++
    :: else -> break
    od;
    peer = 0
}

#ifdef LL_PROTOCOL
#define CAME(src) (src == me || (data[AT(me, b, h, src) * CHUNKS] && data[AT(me, b, h, src) * CHUNKS + CHUNKS - 1]))
#else
#define CAME(src) (src == me || (flag[AT(me, b, h, src) * CHUNKS] >= use_of[me] \
    && flag[AT(me, b, h, src) * CHUNKS + CHUNKS - 1] >= use_of[me]))
#endif
#define ALL_DATA_CAME (CAME(0) && CAME(1) && CAME(W - 1))

#ifdef BREAK_QUIESCE
#define QUIET true
#else
#define QUIET (under_way[me] == 0)
#endif
#ifdef BREAK_ZEROED
#define ZEROED(n) true
#else
#define ZEROED(n) ALL_CAME(n)
#endif

proctype Rank(byte me) {
    byte k, b, h, peer, c, src, meetings, free, dropped, chosen;
    free = (1 << BLOCKS) - 2;  /* block 0 is in use */
    started;
    do
    :: k == CALLS -> break
    :: k < CALLS ->
#if GROWTHS > 0
        if
        :: grow_at[k] ->
            /* Finalizers may have run or not: what is posted is nothing, or all that was dropped, once it is quiet. */
            atomic {
                if
                :: posted[me] = 0
                :: dropped && QUIET -> posted[me] = dropped
                fi;
                met[me]++; meetings++
            }
            atomic {
                ALL_CAME(meetings);
#ifdef BREAK_AGREE
                c = posted[0] | posted[1] | posted[W - 1];
#else
                c = posted[0] & posted[1] & posted[W - 1];
#endif
                free = free | c;
                dropped = dropped & ~c;
                assert(free);
                chosen = 0;
                do
                :: (free >> chosen) & 1 -> break
                :: else -> chosen++
                od;
                free = free & ~(1 << chosen);
                for (h : 0 .. (BUFFERS - 1)) {
                    epoch[(me * BLOCKS + chosen) * BUFFERS + h] = 0;
                    for (src : 0 .. (W - 1)) {
                        done_at[AT(me, chosen, h, src)] = 0;
                        for (c : 0 .. (CHUNKS - 1)) {
                            flag[AT(me, chosen, h, src) * CHUNKS + c] = 0;
#ifdef LL_PROTOCOL
                            data[AT(me, chosen, h, src) * CHUNKS + c] = 0
#endif
                        }
                    }
                }
                c = 0; src = 0; h = 0;
                met[me]++; meetings++
            }
            atomic {
                ZEROED(meetings);
                dropped = dropped | (1 << b); b = chosen; chosen = 0
            }
        :: else
        fi;
#endif
        atomic {
            h = buffer_of[k];
            use_of[me] = epoch[(me * BLOCKS + b) * BUFFERS + h] + 1;
            block_of[me] = b;
            pushing[me]++
        }
#ifdef BREAK_DONE
        atomic { leave() }
#endif
        atomic { ALL_DATA_CAME; check_all() }
#ifdef BREAK_EMPTIED
        atomic { leave() }
        atomic { empty_all() }
#elif !defined(BREAK_DONE)
        atomic { check_all(); empty_all() }  /* it is read until the end */
        atomic { leave() }
#endif
        atomic { pushed[me] > k -> k++; h = 0 }
    od
}

init {
    byte i, grown;
    atomic {
        for (i : 0 .. (CALLS - 1)) {
            if
            :: buffer_of[i] = 0
            :: i > 0 && BUFFERS > 1 -> buffer_of[i] = 1  /* the buffers are alike */
            fi;
            if
#ifdef ALWAYS_GROW
            :: i == 0 || grown == GROWTHS -> grow_at[i] = false
#else
            :: grow_at[i] = false
#endif
            :: i > 0 && grown < GROWTHS -> grow_at[i] = true; grown++
            fi
        }
        for (i : 0 .. (PLACES - 1)) {
            if
            :: OWNER(i) != WRITER(i) -> run Wire(i)
            :: else
            fi
        }
        for (i : 0 .. (W - 1)) { run Rank(i); run Pusher(i) }
        i = 0; grown = 0; started = true
    }
}
