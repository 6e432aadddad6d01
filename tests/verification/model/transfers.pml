/* The protocol of symm_mem/registration/semaphores.py: signal, put or get, wait, in a ring without a barrier; the end of a
   registration, and the next one that has its slot.

   Rank me lets the left one access its tensor and accesses that of the right one, TURNS times. Each turn all put or all
   get, chosen at the start in all ways. Before turn AGAIN the registration ends and another begins in the same slot; an
   unused signal may be left over.

   A store into another rank's memory is under way for any time. It does not overtake an earlier one to the same word, nor
   does a release overtake what came before it. `Wire` delivers them.

   In a turn of puts a tensor is its owner's until it signals, in a turn of gets it must stay as it was filled until the
   wait; what arrives is the number of the turn. Anything else is an overwrite of unread data, or a read too early. A rank
   that waits for ever is an invalid end state. What must fail is named BREAK_...:
   BREAK_ALLOWED   an access does not wait for its signal      BREAK_DONE      its owner does not wait for its end
   BREAK_DATA      the end of a put overtakes its data         BREAK_EARLY     the end of a get is told before it has read
   BREAK_SIGNAL    an owner signals while it still reads       BREAK_LOST      a signal does not count
   BREAK_ZEROED    a slot is used again with its old words     BREAK_QUIESCE   a registration ends with stores under way
   BREAK_MEET      a new one is used before all ranks have zeroed their words */

#if W != 2 && W != 3
#error "W: must be 2 or 3"
#endif

#define OWN 100
#define LEFT ((me + W - 1) % W)
#define RIGHT ((me + 1) % W)
#define ALL_CAME(n) (met[0] >= (n) && met[1] >= (n) && met[W - 1] >= (n))

bool puts[TURNS];
byte tensor[W];
byte allowed[W], accessed[W];                    /* at a rank, by the right one and by the left one */
byte data_sent[W], allowed_sent[W], accessed_sent[W];  /* stores under way to a rank; 0 is none */
byte met[W];
bool started;

#ifdef BREAK_DATA
#define DONE_MAY_COME(i) accessed_sent[i]
#else
#define DONE_MAY_COME(i) (accessed_sent[i] && !data_sent[i])
#endif

proctype Wire(byte i) {
end:
    do
    :: atomic { data_sent[i] -> tensor[i] = data_sent[i]; data_sent[i] = 0 }
    :: atomic { allowed_sent[i] -> allowed[i] = allowed_sent[i]; allowed_sent[i] = 0 }
    :: atomic { DONE_MAY_COME(i) -> accessed[i] = accessed_sent[i]; accessed_sent[i] = 0 }
    od
}

#ifdef BREAK_LOST
#define COUNTED (me != 0 || sent != 1)
#else
#define COUNTED true
#endif

inline signal() {
    sent++;
    if
    :: COUNTED -> allowed_sent[LEFT] = sent
    :: else
    fi
}

#ifdef BREAK_ALLOWED
#define MAY_ACCESS true
#else
#define MAY_ACCESS (allowed[me] >= moved + 1)
#endif
#ifdef BREAK_DONE
#define IS_OVER true
#else
#define IS_OVER (accessed[me] >= waited + 1)
#endif
#ifdef BREAK_QUIESCE
#define QUIET true
#else
#define QUIET (!allowed_sent[LEFT] && !accessed_sent[RIGHT] && !data_sent[RIGHT])
#endif

inline put_turn() {
    atomic { tensor[me] = OWN }
#ifdef BREAK_SIGNAL
    signal();
    atomic { assert(tensor[me] == OWN) }
#else
    atomic { assert(tensor[me] == OWN); signal() }
#endif
    atomic { MAY_ACCESS -> moved++; data_sent[RIGHT] = k + 1 }
    atomic { accessed_sent[RIGHT] = moved }
    atomic { IS_OVER -> waited++; assert(tensor[me] == k + 1) }
    atomic { assert(tensor[me] == k + 1) }  /* it is read until the end */
}

inline get_turn() {
    atomic { tensor[me] = k + 1; signal() }
    atomic { MAY_ACCESS -> moved++; assert(tensor[RIGHT] == k + 1) }
#ifdef BREAK_EARLY
    atomic { accessed_sent[RIGHT] = moved }
    atomic { assert(tensor[RIGHT] == k + 1) }
#else
    atomic { assert(tensor[RIGHT] == k + 1); accessed_sent[RIGHT] = moved }
#endif
    atomic { IS_OVER -> waited++; tensor[me] = OWN }
}

inline register_again() {
    if
    :: signal()  /* nobody uses it */
    :: true
    fi;
    atomic { QUIET -> met[me]++ }
    atomic {
        ALL_CAME(1);
#ifndef BREAK_ZEROED
        allowed[me] = 0; accessed[me] = 0;
#endif
        sent = 0; moved = 0; waited = 0;
        met[me]++
    }
#ifndef BREAK_MEET
    atomic { ALL_CAME(2) }
#endif
}

proctype Rank(byte me) {
    byte k, sent, moved, waited;
    started;
    do
    :: k == TURNS -> break
    :: k < TURNS ->
        if
        :: k == AGAIN -> register_again()
        :: else
        fi;
        if
        :: puts[k] -> put_turn()
        :: !puts[k] -> get_turn()
        fi;
        k++
    od
}

init {
    byte i;
    atomic {
        for (i : 0 .. (TURNS - 1)) {
            if
            :: puts[i] = true
            :: puts[i] = false
            fi
        }
        for (i : 0 .. (W - 1)) { run Wire(i); run Rank(i) }
        i = 0; started = true
    }
}
