// The threads that run one kernel together, inside one OpenMP parallel region.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cassert>
#include <cstdint>

#include "meeting.h"

namespace specdec {

struct Team {
  int64_t index, size;
  Meeting* meeting = nullptr;  // of those that run together

  // This thread's part of `count` things; the parts differ by one at most.
  Range share(int64_t count) const {
    return {index * count / size, (index + 1) * count / size};
  }

  // A stage of `total` things, of which each thread has count_of(thread): it does its own in order,
  // and then those that others have left, from their end. Calls visit(owner, index). Every thread of
  // the team comes to every stage; when it returns, all is done and seen by all.
  template <typename CountOf, typename Visit>
  void hand_out(int64_t total, CountOf count_of, Visit visit) const {
    if (size == 1) {
      for (int64_t thing = 0; thing < total; ++thing) visit(index, thing);
      return;
    }
    assert(total <= Meeting::kMostThings);
    if (total == 0 || !meeting->enter(index, total)) return;
    for (int64_t turn = 0; turn < size; ++turn) {
      // Whether others have left any is for them to say, at a cost: most are about to be through.
      if (turn == 1 && meeting->await_moment(index)) return;
      const int64_t num_done = take_all((index + turn) % size, count_of, visit);
      if (num_done > 0 && meeting->add(index, num_done)) return;
    }
    meeting->await(index);
  }

  // A stage of `count` things, alike in work: calls visit(index).
  template <typename Visit>
  void for_each(int64_t count, Visit visit) const {
    const auto share_of = [&](int64_t owner) { return Team{owner, size}.share(count); };
    const auto count_of = [&](int64_t owner) { return share_of(owner).end - share_of(owner).begin; };
    hand_out(count, count_of,
             [&](int64_t owner, int64_t thing) { visit(share_of(owner).begin + thing); });
  }

  // A stage of many small things: calls visit(range) for a few ranges of them a thread.
  template <typename Visit>
  void divide(int64_t count, Visit visit) const {
    const int64_t pieces = std::min(count, kPiecesPerThread * size);
    for_each(pieces, [&](int64_t piece) { visit(Team{piece, pieces}.share(count)); });
  }

  // A stage in which all threads are there at once.
  void barrier() const {
    if (size == 1) return;
    meeting->enter(index, size);
    if (!meeting->add(index, 1)) meeting->await(index);
  }

 private:
  static constexpr int64_t kPiecesPerThread = 2;

  // Does what is left of an owner's things, and returns how many that were.
  template <typename CountOf, typename Visit>
  int64_t take_all(int64_t owner, CountOf count_of, Visit visit) const {
    const int64_t count = count_of(owner);
    if (count == 0) return 0;  // and leave alone the word that its owner is about to need
    int64_t num_done = 0, thing;
    while ((thing = meeting->take(index, owner, count)) >= 0) {
      visit(owner, thing);
      ++num_done;
    }
    return num_done;
  }
};

// Calls work(team) on `num_threads` threads and returns when all are done.
template <typename Work>
void run_team(int num_threads, const Work& work) {
  Meeting meeting(num_threads);
#pragma omp parallel num_threads(num_threads)
  {
    const Team team = {omp_get_thread_num(), omp_get_num_threads(), &meeting};
    work(team);
    team.barrier();  // OpenMP has one of its own here, at which nobody should wait for long
  }
}

// Calls visit(index) for each of `count` things, in a parallel region of its own.
template <typename Visit>
void run_for_each(int64_t count, const Visit& visit) {
  run_team(count > 1 ? omp_get_max_threads() : 1, [&](Team team) { team.for_each(count, visit); });
}

}  // namespace specdec

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))
