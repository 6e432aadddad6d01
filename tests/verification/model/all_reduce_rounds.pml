/* two_shot_rounds of kernels/all_reduce/kernel.cu: several uses of the slots in one launch, kernels/device/comm/credits.cuh.

   Every rank launches the same CALLS kernels of one block, one after the other; how many uses each makes, from LEAST to
   MOST, is chosen at the start in all ways. The block has WORKERS threads that send, and a steward. all_reduce.pml has
   what holds for several blocks, and for vectors of several words.

   Every word travels by itself and for any time: no store is ordered behind another. The zeros that empty a slot are in
   the rank's own memory when its kernel has ended or behind the steward's fence, and not surely before. What a rank says
   to another one it says in order.

   A word is the number of its use and trip, 0 is empty. Reading another use's word, or an empty one, is an error; who
   waits for ever is an invalid end state.

   W ranks. The zeros of the first PROMPT workers are in memory at once. What must fail:
   BREAK_FENCE   the steward says that slots are empty while zeros are under way
   BREAK_EMPTIED it says so when one worker has emptied its own
   BREAK_HEAR    workers send for the next use without having heard that slots are empty
   BREAK_FIRST   the steward does not say at its begin that all before is empty
   BREAK_LAST    it ends without having heard that all but the last use is emptied */

#if W != 2 && W != 3
#error "W: must be 2 or 3"
#endif

#define TRIPS 2
#define SLOTS (W * 2 * TRIPS * WORKERS * W)
#define AT(owner, buffer, trip, worker, writer) (((((owner) * 2 + (buffer)) * TRIPS + (trip)) * WORKERS + (worker)) * W + (writer))
#define WRITER(i) ((i) % W)
#define OWNER(i) ((i) / (W * WORKERS * TRIPS * 2))
#define BUFFER(i) ((i) / (W * WORKERS * TRIPS) % 2)
#define WORD(use, trip) ((use) * TRIPS + (trip) + 1)

byte uses[CALLS];

byte slot[SLOTS];
byte sent[SLOTS];            /* words under way; 0 is none */
bool zeroing[SLOTS];         /* zeros that are not yet in memory */
byte zeros[W * 2];           /* how many, by rank and buffer */
byte said[W * W];            /* by listener and speaker: the last use that is empty, as it was said */
byte heard[W * W];           /* and as it has arrived */

byte running[W];             /* the call whose kernel runs */
byte epoch[W];               /* uses before it */
byte asking[W];              /* workers that want to send for the next use, since the kernel's begin */
byte allowed[W];             /* times that the steward has let them */
byte emptied[W];             /* workers that have emptied their slots of a use, since the kernel's begin */
byte left[W];                /* threads at the kernel's end */
bool started;

proctype Wire(byte i) {
end:
    do
    :: atomic { sent[i] -> slot[i] = sent[i]; sent[i] = 0 }
    :: atomic { zeroing[i] -> zeroing[i] = false; slot[i] = 0; zeros[OWNER(i) * 2 + BUFFER(i)]-- }
    od
}

proctype Voice(byte i) {
end:
    do
    :: atomic { heard[i] != said[i] -> heard[i] = said[i] }
    od
}

inline send_all(use, trip) {
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me -> sent[AT(peer, (use) & 1, trip, t, me)] = WORD(use, trip)
        :: else
        fi
    }
    peer = 0
}

#define FULL(src, use, trip) (src == me || slot[AT(me, (use) & 1, trip, t, src)])

inline receive_all(use, trip) {
    (FULL(0, use, trip) && FULL(1, use, trip) && FULL(W - 1, use, trip));
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me ->
            assert(slot[AT(me, (use) & 1, trip, t, peer)] == WORD(use, trip));
            assert(!zeroing[AT(me, (use) & 1, trip, t, peer)]);
            if
            :: t < PROMPT -> slot[AT(me, (use) & 1, trip, t, peer)] = 0
            :: else ->
                zeroing[AT(me, (use) & 1, trip, t, peer)] = true;
                zeros[me * 2 + ((use) & 1)]++
            fi
        :: else
        fi
    }
    peer = 0
}

#ifdef BREAK_HEAR
#define ALLOWED true
#else
#define ALLOWED (allowed[me] > round)
#endif

proctype Worker(byte me; byte t) {
    byte k, use, round, peer;
    started;
    do
    :: k == CALLS -> break
    :: k < CALLS ->
        atomic { running[me] == k -> use = epoch[me] + 1; send_all(use, 0) }
        do
        :: atomic { receive_all(use, 0); send_all(use, 1) }
            if
            :: round + 1 < uses[k] ->
                asking[me]++;
                atomic { (asking[me] >= (round + 1) * WORKERS && ALLOWED); send_all(use + 1, 0) }
                atomic { receive_all(use, 1); emptied[me]++; use++; round++ }
            :: else ->
                atomic { receive_all(use, 1); left[me]++; k++; use = 0; round = 0; break }
            fi
        od
    od
}

inline say(use) {
#ifndef BREAK_FENCE
    (zeros[me * 2 + ((use) & 1)] == 0);
#endif
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me -> said[peer * W + me] = use
        :: else
        fi
    }
    peer = 0
}

#define HEARD(src, use) (src == me || heard[me * W + src] >= use)
#define HEARD_ALL(use) (HEARD(0, use) && HEARD(1, use) && HEARD(W - 1, use))
#ifdef BREAK_EMPTIED
#define ENOUGH 1
#else
#define ENOUGH WORKERS
#endif
#ifdef BREAK_LAST
#define MAY_END true
#else
#define MAY_END HEARD_ALL(use - 1)
#endif

proctype Steward(byte me) {
    byte k, use, round, peer;
    started;
    do
    :: k == CALLS -> break
    :: k < CALLS ->
        atomic { running[me] == k -> use = epoch[me] + 1 }
        if
        :: uses[k] > 1 ->
#ifndef BREAK_FIRST
            atomic { say(use - 1) }
#endif
            do
            :: round + 1 < uses[k] ->
                atomic { HEARD_ALL(use - 1) -> allowed[me]++ }
                atomic { emptied[me] >= round * WORKERS + ENOUGH -> say(use); use++; round++ }
            :: else -> break
            od
            (MAY_END)
        :: else
        fi
        atomic { left[me]++; k++; use = 0; round = 0 }
    od
}

/* The stream: the next kernel begins when the last one has ended. */
proctype Stream(byte me) {
    started;
    do
    :: running[me] == CALLS -> break
    :: atomic { running[me] < CALLS && left[me] == WORKERS + 1 && zeros[me * 2] + zeros[me * 2 + 1] == 0 ->
        epoch[me] = epoch[me] + uses[running[me]];
        asking[me] = 0; allowed[me] = 0; emptied[me] = 0; left[me] = 0; running[me]++ }
    od
}

init {
    byte i, t;
    atomic {
        for (i : 0 .. (CALLS - 1)) {
            select(t : LEAST .. MOST);
            uses[i] = t
        }
        for (i : 0 .. (SLOTS - 1)) {
            if
            :: OWNER(i) != WRITER(i) -> run Wire(i)
            :: else
            fi
        }
        for (i : 0 .. (W * W - 1)) {
            if
            :: i / W != i % W -> run Voice(i)
            :: else
            fi
        }
        for (i : 0 .. (W - 1)) {
            run Stream(i);
            run Steward(i);
            for (t : 0 .. (WORKERS - 1)) { run Worker(i, t) }
        }
        i = 0; t = 0; started = true
    }
}
