// Sampling of draft tokens on all ranks that hold a part of the draft vocabulary.
#pragma once

#include <cstdint>

#include "base/arena.h"
#include "collectives/allreduce.h"
#include "sampling/draft_sampler.h"
#include "threads/thread_team.h"

namespace specdec {

// Samples a token from each row of logits, the same on every rank.
class RankSampler {
 public:
  using Argmax = sampling::Argmax;

  // communicator: null with one rank. target_tokens: of this rank's draft tokens [num_tokens],
  // ascending.
  RankSampler(Communicator* communicator, const int32_t* target_tokens, int64_t num_tokens,
              int64_t max_rows, Arena& arena)
      : communicator_(communicator), target_tokens_(target_tokens), num_tokens_(num_tokens) {
    own_ = allocate(arena, max_rows);
    all_ = communicator ? allocate(arena, max_rows * num_ranks(communicator)) : nullptr;
  }

  // Run stages that call finish(row, token) once for each row: the target's token, or -1 where none
  // can be sampled. params_of(row): the parameters of a row. logits: [num_rows, num_tokens], of
  // this rank. Return false, on every thread, when a peer is lost.
  template <typename ParamsOf, typename Finish>
  bool sample(int64_t num_rows, const float* logits, ParamsOf params_of, Finish finish,
              ThreadTeam team) {
    team.parallel_for(num_rows, [&](int64_t row) {
      static thread_local sampling::DraftSampler sampler;  // reuses its memory
      own_[row] = sampler.draft(params_of(row), logits + row * num_tokens_, target_tokens_,
                                num_tokens_);
      if (!all_) finish(row, token_of(own_[row]));
    });
    if (!all_) return true;
    const int64_t bytes = num_rows * sizeof(Argmax);
    if (!all_gather(communicator_, own_, bytes, all_, team)) return false;
    team.parallel_for(num_rows,
                      [&](int64_t row) { finish(row, token_of(best_of_ranks(row, num_rows))); });
    return true;
  }

 private:
  Communicator* communicator_;
  const int32_t* target_tokens_;
  int64_t num_tokens_;
  Argmax* own_;  // [max_rows], of this rank
  Argmax* all_;  // [num_ranks, num_rows]; null with one rank

  static Argmax* allocate(Arena& arena, int64_t count) {
    return static_cast<Argmax*>(arena.allocate(count * sizeof(Argmax)));
  }

  static int32_t token_of(const Argmax& sample) {
    const bool is_invalid = sample.has_nan || sample.value == -sampling::kInfinity;
    return is_invalid ? -1 : sample.token;
  }

  Argmax best_of_ranks(int64_t row, int64_t num_rows) const {
    Argmax best = all_[row];
    for (int64_t rank = 1; rank < num_ranks(communicator_); ++rank) {
      const Argmax candidate = all_[rank * num_rows + row];
      const bool has_nan = best.has_nan || candidate.has_nan;
      if (candidate.value > best.value) best = candidate;
      best.has_nan = has_nan;
    }
    return best;
  }
};

}  // namespace specdec
