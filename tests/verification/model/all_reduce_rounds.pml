/* two_shot_rounds of kernels/all_reduce/kernel.cu: several epochs of the slots in one launch, each in several chunks,
   kernels/device/collective/rounds.cuh and comm/credits.cuh.

   Every rank launches the same CALLS kernels of one block, one after the other; how many chunks each moves, from
   LEAST to MOST, is chosen at the start in all ways. An epoch takes PARTS of them. The block has WORKERS threads
   that send, and a credit warp. A worker sends a chunk, answers the one before and receives the results of the one
   before that. all_reduce.pml has what holds for several blocks, and for vectors of several words.

   Every word travels by itself and for any time: no store is ordered behind another. The zeros that empty a slot are
   in the rank's own memory when its kernel has ended or behind the credit warp's fence, and not surely before. What
   a rank says to another one it says in order.

   A word is the number of its chunk and trip, 0 is empty. Reading another chunk's word, or an empty one, is an
   error; who waits for ever is an invalid end state.

   W ranks; TRIPS is 2, or 1, as in an all-gather and a reduce-scatter. The zeros of the first PROMPT workers are in
   memory at once. What must fail:
   BREAK_FENCE   the credit warp says that slots are empty while zeros are under way
   BREAK_EMPTIED it says so when one worker has emptied its own
   BREAK_HEAR    workers send for the next epoch without having heard that slots are empty
   BREAK_FIRST   the credit warp does not say at its begin that all before is empty
   BREAK_LAST    it ends without having heard that all but the last epoch is emptied
   PARTS 1       with two trips */

#if (W != 2 && W != 3) || (TRIPS != 1 && TRIPS != 2)
#error "W: must be 2 or 3; TRIPS: 1 or 2"
#endif

#define SLOTS (W * 2 * PARTS * TRIPS * WORKERS * W)
#define EPOCH(c) (ended[me] + 1 + (c) / PARTS)
#define PLACE(c, trip) (((EPOCH(c) & 1) * PARTS + (c) % PARTS) * TRIPS + (trip))
#define AT(owner, place, worker, writer) ((((owner) * 2 * PARTS * TRIPS + (place)) * WORKERS + (worker)) * W + (writer))
#define WRITER(i) ((i) % W)
#define OWNER(i) ((i) / (W * WORKERS * TRIPS * PARTS * 2))
#define BUFFER(i) ((i) / (W * WORKERS * TRIPS * PARTS) % 2)
#define WORD(c, trip) ((EPOCH(c) * PARTS + (c) % PARTS) * TRIPS + (trip) + 1)
#define EPOCHS(k) ((chunks[k] + PARTS - 1) / PARTS)

byte chunks[CALLS];

byte slot[SLOTS];
byte sent[SLOTS];            /* words under way; 0 is none */
bool zeroing[SLOTS];         /* zeros that are not yet in memory */
byte zeros[W * 2];           /* how many, by rank and buffer */
byte said[W * W];            /* by listener and speaker: the last epoch that is empty, as it was said */
byte heard[W * W];           /* and as it has arrived */

byte running[W];             /* the call whose kernel runs */
byte ended[W];               /* epochs before it */
byte asking[W];              /* workers that want to send for the next epoch, since the kernel's begin */
byte allowed[W];             /* times that the credit warp has let them */
byte emptied[W];             /* workers that have emptied their slots of an epoch, since the kernel's begin */
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

inline send_all(c, trip) {
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me -> sent[AT(peer, PLACE(c, trip), t, me)] = WORD(c, trip)
        :: else
        fi
    }
    peer = 0
}

#define FULL(src, c, trip) (src == me || slot[AT(me, PLACE(c, trip), t, src)])
#define ALL_FULL(c, trip) (FULL(0, c, trip) && FULL(1, c, trip) && FULL(W - 1, c, trip))

inline take_all(c, trip) {
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me ->
            assert(slot[AT(me, PLACE(c, trip), t, peer)] == WORD(c, trip));
            assert(!zeroing[AT(me, PLACE(c, trip), t, peer)]);
            if
            :: t < PROMPT -> slot[AT(me, PLACE(c, trip), t, peer)] = 0
            :: else ->
                zeroing[AT(me, PLACE(c, trip), t, peer)] = true;
                zeros[me * 2 + (EPOCH(c) & 1)]++
            fi
        :: else
        fi
    }
    peer = 0
}

#ifdef BREAK_HEAR
#define ALLOWED(epoch) true
#else
#define ALLOWED(epoch) (allowed[me] >= (epoch))
#endif

/* What a worker does in step i of a call. */
#define IS_NEXT_EPOCH(c) ((c) > 0 && (c) % PARTS == 0 && (c) < chunks[k])
#define MAY_SEND (!IS_NEXT_EPOCH(i) || (asking[me] >= i / PARTS * WORKERS && ALLOWED(i / PARTS)))
#define ANSWERS (TRIPS == 2 && i > 0 && i <= chunks[k])
#define ENDS_EPOCH ((i - TRIPS) % PARTS == PARTS - 1 && i + 1 < chunks[k] + TRIPS)

#define SEND 0
#define ANSWER 1
#define RECEIVE 2

/* To what comes next, of this step or the next one. */
inline next() {
    if
    :: does == SEND && ANSWERS -> does = ANSWER
    :: does != RECEIVE && !(does == SEND && ANSWERS) && i >= TRIPS -> does = RECEIVE
    :: else ->
        i++;
        asking[me] = asking[me] + IS_NEXT_EPOCH(i);
        if
        :: i < chunks[k] -> does = SEND
        :: i >= chunks[k] && ANSWERS -> does = ANSWER
        :: else -> does = RECEIVE
        fi
    fi
}

proctype Worker(byte me; byte t) {
    byte k, i, does, peer;
    started;
    do
    :: k == CALLS -> break
    :: atomic { k < CALLS && i == 0 && running[me] == k -> send_all(0, 0); next() }
    :: atomic { i > 0 && i < chunks[k] + TRIPS && does == SEND && MAY_SEND -> send_all(i, 0); next() }
    :: atomic {
        i > 0 && i < chunks[k] + TRIPS && does == ANSWER && ALL_FULL((i - 1), 0) ->
            take_all((i - 1), 0); send_all((i - 1), 1); next()
    }
    :: atomic {
        i > 0 && i < chunks[k] + TRIPS && does == RECEIVE && ALL_FULL((i - TRIPS), TRIPS - 1) ->
            take_all((i - TRIPS), TRIPS - 1);
            emptied[me] = emptied[me] + ENDS_EPOCH;
            next();
            if
            :: i == chunks[k] + TRIPS -> i = 0; does = SEND; k++; left[me]++
            :: else
            fi
    }
    od
}

inline say(epoch) {
#ifndef BREAK_FENCE
    (zeros[me * 2 + ((epoch) & 1)] == 0);
#endif
    for (peer : 0 .. (W - 1)) {
        if
        :: peer != me -> said[peer * W + me] = epoch
        :: else
        fi
    }
    peer = 0
}

#define HEARD(src, epoch) (src == me || heard[me * W + src] >= epoch)
#define HEARD_ALL(epoch) (HEARD(0, epoch) && HEARD(1, epoch) && HEARD(W - 1, epoch))
#ifdef BREAK_EMPTIED
#define ENOUGH 1
#else
#define ENOUGH WORKERS
#endif
#ifdef BREAK_LAST
#define MAY_END true
#else
#define MAY_END HEARD_ALL(epoch - 1)
#endif

proctype CreditWarp(byte me) {
    byte k, epoch, round, peer;
    started;
    do
    :: k == CALLS -> break
    :: k < CALLS ->
        atomic { running[me] == k -> epoch = ended[me] + 1 }
        if
        :: EPOCHS(k) > 1 ->
#ifndef BREAK_FIRST
            atomic { say(epoch - 1) }
#endif
            do
            :: round + 1 < EPOCHS(k) ->
                atomic { HEARD_ALL(epoch - 1) -> allowed[me]++ }
                atomic { emptied[me] >= round * WORKERS + ENOUGH -> say(epoch); epoch++; round++ }
            :: else -> break
            od
            (MAY_END)
        :: else
        fi
        atomic { left[me]++; k++; epoch = 0; round = 0 }
    od
}

/* The stream: the next kernel begins when the last one has ended. */
proctype Stream(byte me) {
    started;
    do
    :: running[me] == CALLS -> break
    :: atomic { running[me] < CALLS && left[me] == WORKERS + 1 && zeros[me * 2] + zeros[me * 2 + 1] == 0 ->
        ended[me] = ended[me] + EPOCHS(running[me]);
        asking[me] = 0; allowed[me] = 0; emptied[me] = 0; left[me] = 0; running[me]++ }
    od
}

init {
    byte i, t;
    atomic {
        for (i : 0 .. (CALLS - 1)) {
            select(t : LEAST .. MOST);
            chunks[i] = t
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
            run CreditWarp(i);
            for (t : 0 .. (WORKERS - 1)) { run Worker(i, t) }
        }
        i = 0; t = 0; started = true
    }
}
