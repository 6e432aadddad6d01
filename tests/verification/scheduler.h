// Which fiber goes on. Of fibers.h, in the one source of a program that defines SIMULATOR.

#pragma once

static unsigned turns_a_rank = 2000;  // at most, before another rank's

static long most_turns = 600'000'000;  // of a run: twice what any takes that ends
EXPORTED void allow(long turns) { most_turns = turns; }

static void launch_begins(Rank& rank);
static void launch_ends(Rank& rank);
static bool rests(const Rank& rank, const Fiber& fiber);  // whether it goes without this turn
static void between_turns(unsigned passed);
static bool comes_later();  // whether something is on its way that no fiber does
static bool has_no_room(const Rank& rank, const Fiber& fiber);  // before others have ended

static void body() {
    call(current->number, launched().kernel, current->params[running->early]);
    running->done = true;
    go_on_later();
}

// Launches that the next one begins with, and itself.
static size_t at_once(const Rank& rank) {
    return rank.next + 1 < rank.launches.size() && rank.launches[rank.next + 1]->early ? 2 : 1;
}

static void start(Rank& rank) {
    int blocks = 0;
    for (size_t l = 0; l < at_once(rank); ++l) {
        const Launch& launch = *rank.launches[rank.next + l];
        std::memcpy(rank.params[l], launch.params, sizeof launch.params);
        for (int i = 0; i < launch.blocks * launch.threads; ++i) {
            auto fiber = std::make_unique<Fiber>();
            fiber->rank = &rank;
            constexpr size_t STACK = 16 << 10;
            fiber->stack.reset(new char[STACK]);
            fiber->number = rank.fibers.size();
            fiber->thread = i % launch.threads;
            fiber->block = blocks + i / launch.threads;
            fiber->early = l > 0;
            getcontext(&fiber->context);
            fiber->context.uc_stack.ss_sp = fiber->stack.get();
            fiber->context.uc_stack.ss_size = STACK;
            fiber->context.uc_link = nullptr;
            makecontext(&fiber->context, body, 0);
            is_ready(fiber.get());
            rank.fibers.push_back(std::move(fiber));
        }
        rank.unfinished[l] = launch.blocks * launch.threads;
        blocks += launch.blocks;
    }
    rank.blocks.assign(blocks, Meeting());
    rank.barriers.assign(blocks * 16, Meeting());
    rank.shared.clear();
    rank.begun.assign(blocks, 0);
    rank.warps.assign(blocks * 32, Meeting());
    launch_begins(rank);
}

static bool waits_in_vain(const Rank& rank) {
    for (size_t i = 0; i < rank.ready.size(); ++i) {
        const Wait& what = rank.waits[i];
        const bool waits = what.over != nullptr && !what.has_deadline && !what.over(what.condition);
        if (!waits && !has_no_room(rank, *rank.ready[i])) return false;
    }
    return !rank.fibers.empty();
}

// Rank `late` begins when the others have had so many turns, or are at their end. False: not all comes to its end.
static bool run_all(std::vector<Rank>& all, unsigned seed, int late = -1, long wanted = 0) {
    dice.seed(seed);
    parked_at.clear();
    std::vector<int> busy;
    for (int r = 0; r < int(all.size()); ++r) {
        if (r != late) busy.push_back(r);
    }
    bool begun = late < 0;
    long all_turns = 0, since = 0;  // the last switch
    while (!busy.empty() || !begun) {
        if (!begun && (wanted <= 0 || busy.empty())) {
            begun = true;
            busy.push_back(late);
        }
        // A rank runs for a while before another one does: they drift apart by whole calls.
        const size_t pick = dice.below(busy.size());
        Rank& rank = all[busy[pick]];
        if (all_turns > most_turns) return false;
        if (begun && all_turns - since > FEW_TURNS) {
            since = all_turns;
            const auto in_vain = [&](int r) { return waits_in_vain(all[r]); };
            if (!comes_later() && std::all_of(busy.begin(), busy.end(), in_vain)) return false;
        }
        for (long turns = dice.below(turns_a_rank); turns >= 0 && rank.next < rank.launches.size();) {
            if (rank.fibers.empty()) start(rank);
            // Turns are dealt to all: so many go, on average, to those that are parked before one does to another.
            const unsigned ready = std::max<size_t>(rank.ready.size(), 1);
            const unsigned passed = (rank.unfinished[0] + rank.unfinished[1] + dice.below(ready)) / ready;
            turns -= passed;
            wanted -= passed;
            all_turns += passed;
            between_turns(passed);
            if (rank.ready.empty()) continue;
            const size_t i = dice.below(rank.ready.size());
            Fiber& fiber = *rank.ready[i];
            if (rests(rank, fiber)) continue;
            const Wait& what = rank.waits[i];
            if (what.over != nullptr && !what.over(what.condition)) continue;
            current = &rank;
            running = &fiber;
            threadIdx.x = fiber.thread;
            Launch& launch = *rank.launches[rank.next + fiber.early];
            blockIdx.x = fiber.block - (fiber.early ? rank.launches[rank.next]->blocks : 0);
            blockDim.x = launch.threads;
            gridDim.x = launch.blocks;
            since = all_turns;
            go_on(fiber);
            if (fiber.done) {
                is_not_ready(&fiber);
                fiber.stack.reset();
                if (--rank.unfinished[fiber.early] == 0) {
                    launch_ends(rank);
                    const auto* fault = watch_of(rank.params[fiber.early]).fault;
                    launch.broken = fault != nullptr && fault[weft::BROKEN];
                    if (rank.unfinished[0] + rank.unfinished[1] == 0) {
                        rank.next += at_once(rank);
                        rank.fibers.clear();
                    }
                }
            }
        }
        if (rank.next == rank.launches.size()) busy.erase(busy.begin() + pick);
    }
    return true;
}

// Run `count` launches on each of `ranks` ranks; `launches` holds them rank after rank. Those of one rank
// follow each other, as on a stream; one of kernel -1 is none.
EXPORTED int run(Launch* launches, int ranks, int count, unsigned seed, int late, long turns) {
    std::vector<Rank> all(ranks);
    for (int r = 0; r < ranks; ++r) {
        all[r].number = r;
        for (int i = 0; i < count; ++i) {
            if (launches[r * count + i].kernel >= 0) all[r].launches.push_back(launches + r * count + i);
        }
    }
    return run_all(all, seed, late, turns);
}

// Run one launch on one rank, whose waits are all over.
EXPORTED void run_one(Launch* launch, int rank) {
    std::vector<Rank> all(1);
    all[0].number = rank;
    all[0].launches.push_back(launch);
    run_all(all, 0);
}
