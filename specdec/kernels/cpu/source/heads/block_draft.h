// A draft of several tokens after each sequence of a batch, by draft blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "heads/block_pass.h"
#include "heads/drafts.h"
#include "heads/markov_run.h"
#include "sampling/rank_sampler.h"

namespace specdec {

// All threads of a team call `run`. Ranks share memory.
class BlockDraft {
 public:
  // memory: null to count the bytes only.
  BlockDraft(const BlockHead& head, const Batch& pairs, KvCache cache, Drafts drafts, void* memory,
             int num_threads)
      : head_(head), drafts_(drafts), arena_(memory) {
    const auto sequences = drafts.drafting(pairs.num_sequences);
    num_blocks_ = sequences.size();
    const int64_t num_rows = drafts.max_count * num_blocks_, size = head.decoder.hidden_size;
    Communicator* const communicator = head.decoder.communicator;
    outputs_ = arena_.allocate_floats(num_rows * size);
    logits_ = arena_.allocate_floats(num_rows * num_tokens());
    before_ = static_cast<int32_t*>(arena_.allocate(num_blocks_ * sizeof(int32_t)));
    matrix_scratch_ = arena_.allocate(scratch_bytes(head.lm_head, num_rows));
    sampler_.emplace(communicator, head.target_tokens, num_tokens(), num_rows, arena_);
    if (has_markov()) markov_.emplace(head.markov, size, communicator, num_blocks_, arena_);
    pass_.emplace(head, pairs, cache, sequences, drafts.max_count, arena_.rest(), num_threads);
  }

  int64_t memory_bytes() const { return arena_.used() + pass_->memory_bytes(); }
  bool has_failed() const { return has_failed_ || pass_->has_failed(); }

  // Write the KV of the context, and draft. features: [num_pairs, hidden_size].
  void run(const float* features, ThreadTeam team) {
    pass_->run(features, outputs_, team);
    if (pass_->has_failed()) return;
    const int64_t size = head_.decoder.hidden_size;
    const Activations rows = {outputs_, size, drafts_.max_count * num_blocks_, matrix_scratch_};
    quantize_rows(head_.lm_head, rows, team);
    gemm(head_.lm_head, rows, logits_, num_tokens(), Store::kOverwrite, team);
    if (has_markov() ? sample_in_order(team) : sample({0, drafts_.max_count}, team)) {
      team.parallel_for(num_blocks_, [&](int64_t block) { end_draft(block); });
    } else {
      has_failed_ = true;
    }
  }

 private:
  const BlockHead& head_;
  Drafts drafts_;
  int64_t num_blocks_;
  Arena arena_;
  float* outputs_;   // [max_count, num_blocks, hidden_size]
  float* logits_;    // [max_count, num_blocks, num_tokens]
  int32_t* before_;  // [num_blocks], the tokens before those that are sampled
  void* matrix_scratch_;
  std::optional<RankSampler> sampler_;
  std::optional<MarkovRun> markov_;
  std::optional<BlockPass> pass_;
  std::atomic<bool> has_failed_{false};

  int64_t num_tokens() const { return head_.lm_head.out_features; }
  bool has_markov() const { return head_.markov.kind != MarkovKind::kNone; }
  int64_t sequence(int64_t block) const { return pass_->blocks().sequences()[block]; }
  int32_t* tokens(int64_t block) const {
    return drafts_.tokens + sequence(block) * drafts_.max_count;
  }

  // Sample token after token, each with the bias by the one before.
  bool sample_in_order(ThreadTeam team) {
    markov_->begin(team);
    team.parallel_for(num_blocks_,
                      [&](int64_t block) { before_[block] = pass_->blocks().anchor(block); });
    for (int64_t index = 0; index < drafts_.max_count; ++index) {
      const int64_t row = index * num_blocks_;
      const float* outputs = outputs_ + row * head_.decoder.hidden_size;
      if (!markov_->add_bias(before_, outputs, logits_ + row * num_tokens(), team)) return false;
      if (!sample({index, index + 1}, team)) return false;
    }
    return true;
  }

  // Sample some tokens of all drafts. Return false, on every thread, when a peer is lost.
  bool sample(Range indices, ThreadTeam team) {
    const int64_t num_rows = (indices.end - indices.begin) * num_blocks_;
    const auto params_of = [&](int64_t row) {
      return drafts_.params_of(sequence(row % num_blocks_), indices.begin + row / num_blocks_);
    };
    const auto finish = [&](int64_t row, int32_t token) {
      tokens(row % num_blocks_)[indices.begin + row / num_blocks_] = token;
      if (has_markov()) before_[row % num_blocks_] = std::max(token, 0);
    };
    const float* logits = logits_ + indices.begin * num_blocks_ * num_tokens();
    return sampler_->sample(num_rows, logits, params_of, finish, team);
  }

  // End a draft at its count, and where no token can be sampled.
  void end_draft(int64_t block) const {
    int32_t* const first = tokens(block);
    int32_t* const end = first + drafts_.max_count;
    std::fill(std::find(first, first + drafts_.counts[sequence(block)], -1), end, -1);
  }
};

}  // namespace specdec
