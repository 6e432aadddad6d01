/* The all-reduce of kernels/all_reduce/kernel.cu: data that is its own flag, two buffers, a count of epochs for each block.

   Every rank launches the same CALLS kernels, one after the other; how many blocks each has, and whether it is one_shot
   or two_shot, is chosen at the start in all ways. A block sends its words to every peer's slots in the buffer of its own
   use count, waits until no word of its slots is empty, reads and empties them, and counts its use. two_shot does so
   twice, with other slots. Blocks start in the order of their number, RESIDENT of them at once on a rank.

   Every word travels by itself and for any time: no store is ordered behind another. The zeros that empty a slot are in
   the rank's own memory when its kernel has ended, and not surely before.

   A word is the number of its call and trip, 0 is empty. Reading another call's word, or an empty one, is an error; a
   block that waits for ever is an invalid end state.

   W ranks, BLOCKS in a grid at most, WORDS of a vector. FORMS 1: one_shot; FORMS 2: LEAST 1 both, LEAST 2 two_shot.
   What must fail:
   BREAK_BUFFERS  one buffer for all uses                    BREAK_WORDS   only the first word is looked at
   BREAK_EMPTY   slots are not emptied                    BREAK_ZEROS   zeros may come after the kernel's end
   BREAK_VECTOR  a block may be launched without a vector
   BREAK_ORDER   blocks start in any order: with fewer RESIDENT than BLOCKS, ranks may wait for each other */

#if W != 2 && W != 3
#error "W: must be 2 or 3"
#endif

#define SLOTS (W * BLOCKS * 2 * FORMS * W)
#define AT(owner, block, buffer, trip, writer) (((((owner) * BLOCKS + (block)) * 2 + (buffer)) * FORMS + (trip)) * W + (writer))
#define WRITER(i) ((i) % W)
#define OWNER(i) ((i) / (W * FORMS * 2 * BLOCKS))

byte grid[CALLS];            /* blocks of each call */
byte trips[CALLS];           /* 1: one_shot, 2: two_shot */
#ifdef BREAK_VECTOR
byte filled[CALLS];          /* blocks that have a vector */
#define HAS_VECTOR (b < filled[k])
#else
#define HAS_VECTOR true
#endif

byte slot[SLOTS * WORDS];
byte sent[SLOTS * WORDS];    /* words under way; 0 is none */
bool zeroing[SLOTS];         /* zeros that are not yet in memory */
byte zeros[W];               /* how many, by rank */

byte running[W];             /* the call whose kernel runs */
byte begun[W], ended[W];     /* blocks of it */
bool started;

proctype Wire(byte i) {
end:
    do
    :: atomic { sent[i * WORDS] -> slot[i * WORDS] = sent[i * WORDS]; sent[i * WORDS] = 0 }
    :: atomic { sent[i * WORDS + WORDS - 1] ->
        slot[i * WORDS + WORDS - 1] = sent[i * WORDS + WORDS - 1]; sent[i * WORDS + WORDS - 1] = 0 }
    :: atomic { zeroing[i] -> zeroing[i] = false; slot[i * WORDS] = 0; slot[i * WORDS + WORDS - 1] = 0; zeros[OWNER(i)]-- }
    od
}

#define WORD(trip) (k * FORMS + (trip) + 1)

inline send_all(trip) {
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me ->
            for (c : 0 .. (WORDS - 1)) { sent[AT(peer, b, buffer, trip, me) * WORDS + c] = WORD(trip) }
        :: else
        fi
    }
    peer = 0; c = 0
}

#ifdef BREAK_WORDS
#define FULL(src, trip) (src == me || slot[AT(me, b, buffer, trip, src) * WORDS])
#else
#define FULL(src, trip) (src == me || (slot[AT(me, b, buffer, trip, src) * WORDS] \
    && slot[AT(me, b, buffer, trip, src) * WORDS + WORDS - 1]))
#endif

inline receive_all(trip) {
    (FULL(0, trip) && FULL(1, trip) && FULL(W - 1, trip));
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me ->
            for (c : 0 .. (WORDS - 1)) {
                assert(slot[AT(me, b, buffer, trip, peer) * WORDS + c] == WORD(trip))
            }
#ifndef BREAK_EMPTY
            assert(!zeroing[AT(me, b, buffer, trip, peer)]);
            zeroing[AT(me, b, buffer, trip, peer)] = true;
            zeros[me]++
#endif
        :: else
        fi
    }
    peer = 0; c = 0
}

#ifdef BREAK_ORDER
#define MY_TURN true
#else
#define MY_TURN (begun[me] == b)
#endif
#ifdef BREAK_ZEROS
#define ZEROS_ARE_IN true
#else
#define ZEROS_ARE_IN (zeros[me] == 0)
#endif

proctype Block(byte me; byte b) {
    byte k, buffer, peer, c, uses;
    started;
    do
    :: k == CALLS -> break
    :: k < CALLS && b >= grid[k] -> atomic { running[me] > k -> k++ }
    :: k < CALLS && b < grid[k] ->
        atomic {
            (running[me] == k && MY_TURN && begun[me] - ended[me] < RESIDENT);
            begun[me]++;
            uses++;
#ifdef BREAK_BUFFERS
            buffer = 0;
#else
            buffer = uses & 1;
#endif
            if
            :: HAS_VECTOR -> send_all(0)
            :: else
            fi
        }
        if
        :: HAS_VECTOR ->
            atomic {
                receive_all(0);
                if
                :: trips[k] == 2 -> send_all(FORMS - 1)
                :: else
                fi
            }
            if
            :: trips[k] == 2 -> atomic { receive_all(FORMS - 1) }
            :: else
            fi
        :: else
        fi;
        atomic { buffer = 0; ended[me]++; k++ }
    od
}

/* The stream: the next kernel begins when the last one has ended. */
proctype Stream(byte me) {
    started;
    do
    :: running[me] == CALLS -> break
    :: atomic { running[me] < CALLS && ended[me] == grid[running[me]] && ZEROS_ARE_IN ->
        begun[me] = 0; ended[me] = 0; running[me]++ }
    od
}

init {
    byte i, b;
    atomic {
        for (i : 0 .. (CALLS - 1)) {
            select(b : 1 .. BLOCKS);
            grid[i] = b;
            select(b : LEAST .. FORMS);
            trips[i] = b;
#ifdef BREAK_VECTOR
            select(b : 0 .. BLOCKS);
            filled[i] = b;
#endif
        }
        for (i : 0 .. (SLOTS - 1)) {
            if
            :: OWNER(i) != WRITER(i) -> run Wire(i)
            :: else
            fi
        }
        for (i : 0 .. (W - 1)) {
            run Stream(i);
            for (b : 0 .. (BLOCKS - 1)) { run Block(i, b) }
        }
        i = 0; b = 0; started = true
    }
}
