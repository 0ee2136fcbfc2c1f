/* slots.pml - the protocol by which experts change places (docs/placement.md; src/experts/tiers_move.c, tiers_use.c), as a model for spin.
 *
 * Slots hold bytes of experts; the table names each expert's slot, or the disk. A move takes a free slot, the mover writes it, publishing changes the
 * table, and the slot that was left becomes free when nobody reads it any more. Asserted: whoever reads a slot sees the whole expert from beginning to
 * end; the mover writes only slots that no entry of the table names and nobody reads; every move ends (the engine waits for them, so one that
 * does not is a deadlock), and then every slot is free or somebody's.
 *
 *   default     with a card: kernels read by a copy of the table taken at the begin of a pass; publishing is part of the begin, with no pass under way
 *   HOST        without: users pin slots, the mover publishes at once, a slot that is pinned is freed by the last user
 *   EARLY       (wrong, must be found) a slot is free as soon as the bytes have landed elsewhere
 *   UNPINNED    (wrong, must be found; HOST) publishing frees a slot whoever reads it
 */
#define E 3 /* experts */
#define N 3 /* slots */
#define DISK 9
#define WRITING 8
#define NOTHING 7
#define STOP 6

#ifndef PASSES
#define PASSES 3
#endif

mtype = { FREE, TAKEN, LIVE, LEFT };

byte table[E] = DISK;
byte content[N] = NOTHING;
mtype state[N] = FREE;
byte readers[N];
bool busy[E], landed[E];
byte dst[E];
byte at_work;
chan work = [E] of { byte };

/* An expert that is not busy gets a free slot, or the disk. */
inline ask(e, d)
{
    if
    :: select(e : 0 .. E - 1);
       atomic {
           if
           :: !busy[e] ->
              if
              :: state[0] == FREE -> d = 0
              :: state[1] == FREE -> d = 1
              :: state[2] == FREE -> d = 2
              :: table[e] != DISK -> d = DISK
              :: else -> d = NOTHING
              fi;
              if
              :: d == NOTHING -> skip
              :: d == DISK -> busy[e] = true; dst[e] = DISK; landed[e] = true
              :: else -> busy[e] = true; dst[e] = d; state[d] = TAKEN; at_work++; work!e
              fi
           :: else -> skip
           fi
       }
    :: skip
    fi
}

/* Everything that has landed becomes valid; under the lock. */
inline publish(k, old)
{
    k = 0;
    do
    :: k < E ->
       if
       :: landed[k] ->
          old = table[k];
          table[k] = dst[k];
          if
          :: dst[k] != DISK -> state[dst[k]] = LIVE
          :: else -> skip
          fi;
          if
          :: old != DISK ->
#if defined(EARLY)
             skip
#elif defined(UNPINNED)
             state[old] = FREE
#else
             if
             :: readers[old] == 0 -> state[old] = FREE
             :: else -> state[old] = LEFT
             fi
#endif
          :: else -> skip
          fi;
          landed[k] = false;
          busy[k] = false
       :: else -> skip
       fi;
       k++
    :: else -> break
    od;
    k = 0;
    old = 0
}

active proctype mover()
{
    byte e, d, k, old;
    do
    :: work?e ->
       if
       :: e == STOP -> break
       :: else -> skip
       fi;
       d = dst[e];
       atomic {
           assert(state[d] == TAKEN && readers[d] == 0);
           assert(table[0] != d && table[1] != d && table[2] != d);
           content[d] = WRITING
       }
       atomic {
           assert(content[d] == WRITING && readers[d] == 0);
           content[d] = e
       }
       atomic {
           landed[e] = true;
           at_work--;
#ifdef EARLY
           if
           :: table[e] != DISK -> state[table[e]] = FREE
           :: else -> skip
           fi;
#endif
#ifdef HOST
           publish(k, old);
#endif
           d = 0;
           e = 0
       }
    od
}

#ifdef HOST
/* Somebody who computes on the host. */
proctype user()
{
    byte i, e, p;
    for (i : 1 .. PASSES) {
        select(e : 0 .. E - 1);
        atomic {
            p = table[e];
            if
            :: p != DISK -> readers[p]++
            :: else -> skip
            fi
        }
        if
        :: p != DISK ->
           assert(content[p] == e);
           assert(content[p] == e);
           atomic {
               readers[p]--;
               if
               :: readers[p] == 0 && state[p] == LEFT -> state[p] = FREE
               :: else -> skip
               fi
           }
        :: else -> skip
        fi
    }
}
#endif

active proctype engine()
{
    byte pass, e, d, p, k, old;
#ifdef HOST
    run user();
#endif
    for (pass : 1 .. PASSES) {
        atomic { publish(k, old) } /* begin */
        ask(e, d);
#ifndef HOST
        /* A kernel of this pass reads by the table as it was published. */
        select(e : 0 .. E - 1);
        p = table[e];
        if
        :: p != DISK ->
           readers[p]++;
           assert(content[p] == e);
           ask(k, d); /* the policy may be asked while it runs */
           assert(content[p] == e);
           readers[p]--
        :: else -> skip
        fi;
#endif
        ask(e, d)
    }
    do /* every move ends */
    :: at_work == 0 ->
       atomic { publish(k, old) }
       if
       :: at_work == 0 && !busy[0] && !busy[1] && !busy[2] -> break
       :: else -> skip
       fi
    od;
    work!STOP;
#ifdef HOST
    (_nr_pr <= 2); /* the user has ended; the mover may not have yet */
#endif
    for (k : 0 .. N - 1) {
        assert(state[k] == FREE || state[k] == LIVE);
        assert((state[k] == LIVE) == (table[0] == k || table[1] == k || table[2] == k))
    }
}
