// A draft of several tokens for each sequence of a batch: passes of a head and its samples.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "heads/drafts.h"
#include "heads/pair_pass.h"
#include "sampling/rank_sampler.h"

namespace specdec {

// Step `index` of a draft: a pass, and the sampling of token `index` of `sequences`. Its batch is
// the given pairs, or one pair of each sequence after the sampled tokens; a sequence whose draft
// has ended leaves it.
struct DraftStep {
  std::vector<int64_t> sequences;  // in order
  std::vector<int64_t> tokens;     // of the batch, whose states the samples are from
  std::vector<int64_t> followers;  // rows of the next step, or -1
  std::vector<int32_t> input_ids, query_starts, context_lens;
  std::vector<const int32_t*> block_tables;
  AdapterRuns adapters;  // of a step after the first one
  Batch batch;
};

// All threads of a team call `run`.
class DraftRun {
 public:
  // memory: null to count the bytes only.
  DraftRun(const DraftHead& head, const Batch& pairs, KvCache cache, Drafts drafts, void* memory,
           int num_threads)
      : head_(head), drafts_(drafts) {
    add_steps(pairs);
    const int64_t num_rows = steps_[0].sequences.size(), size = head.decoder.hidden_size;
    Arena arena(memory);
    hidden_ = arena.allocate_floats(num_rows * size);
    states_ = arena.allocate_floats(num_rows * size);
    next_features_ = arena.allocate_floats(num_rows * size);
    logits_ = arena.allocate_floats(num_rows * num_tokens());
    matrix_scratch_ = arena.allocate(scratch_bytes(head.lm_head, num_rows));
    sampler_.emplace(head.decoder.communicator, head.target_tokens, num_tokens(), num_rows, arena);
    int64_t pass_bytes = 0;
    for (const DraftStep& step : steps_) {
      passes_.emplace_back(head, step.batch, cache, arena.rest(), num_threads);
      pass_bytes = std::max(pass_bytes, passes_.back().memory_bytes());
    }
    memory_bytes_ = arena.used() + pass_bytes;
  }

  int64_t memory_bytes() const { return memory_bytes_; }
  bool has_failed() const { return has_failed_; }

  // Write the KV of the pairs, and draft. features: as in PairPass.
  void run(const float* features, ThreadTeam team) {
    for (size_t index = 0; index < steps_.size() && !has_failed_; ++index) {
      passes_[index].run(index == 0 ? features : next_features_, team);
      if (passes_[index].has_failed()) {
        has_failed_ = true;
      } else if (!steps_[index].sequences.empty()) {
        score(index, team);
        sample(index, team);
      }
    }
  }

 private:
  const DraftHead& head_;
  Drafts drafts_;
  std::deque<DraftStep> steps_;  // at least one; a deque does not move its elements
  std::deque<PairPass> passes_;  // of the steps; they share memory
  std::atomic<bool> has_failed_{false};
  int64_t memory_bytes_;
  float* hidden_;         // [num_rows, hidden_size], inputs of the output head
  float* states_;         // [num_rows, hidden_size], features of the sampled tokens
  float* next_features_;  // [num_rows, hidden_size], those of the next step's rows
  float* logits_;         // [num_rows, num_tokens]
  void* matrix_scratch_;
  std::optional<RankSampler> sampler_;

  int64_t num_tokens() const { return head_.lm_head.out_features; }

  void add_steps(const Batch& pairs) {
    steps_.emplace_back();
    steps_[0].batch = pairs;
    steps_[0].sequences = drafts_.drafting(pairs.num_sequences);
    for (int64_t sequence : steps_[0].sequences) {
      steps_[0].tokens.push_back(pairs.query_starts[sequence + 1] - 1);
    }
    for (int64_t index = 1; index < drafts_.max_count; ++index) add_step(pairs, index);
  }

  void add_step(const Batch& pairs, int64_t index) {
    DraftStep& before = steps_[index - 1];
    DraftStep& step = steps_.emplace_back();
    for (int64_t sequence : before.sequences) {
      const int64_t row = step.sequences.size();
      const bool goes_on = drafts_.counts[sequence] > index;
      before.followers.push_back(goes_on ? row : -1);
      if (!goes_on) continue;
      step.sequences.push_back(sequence);
      step.tokens.push_back(row);
      step.query_starts.push_back(row);
      step.context_lens.push_back(pairs.context_lens[sequence] + index);
      step.block_tables.push_back(pairs.block_tables[sequence]);
      step.adapters.add(pairs, pairs.query_starts[sequence], 1);
    }
    const int64_t num_rows = step.sequences.size();
    step.query_starts.push_back(num_rows);
    step.input_ids.resize(num_rows);
    step.batch = pairs;
    step.batch.num_tokens = step.batch.num_sequences = num_rows;
    step.batch.input_ids = step.input_ids.data();
    step.batch.query_starts = step.query_starts.data();
    step.batch.context_lens = step.context_lens.data();
    step.batch.block_tables = step.block_tables.data();
    step.adapters.set(step.batch);
  }

  // Compute the logits of the step's rows.
  void score(size_t index, ThreadTeam team) {
    const int64_t num_rows = steps_[index].sequences.size(), size = head_.decoder.hidden_size;
    const Activations rows = {hidden_, size, num_rows, matrix_scratch_};
    team.parallel_for(num_rows, [&](int64_t row) {
      const int64_t token = steps_[index].tokens[row];
      passes_[index].write_state(token, hidden_ + row * size, states_ + row * size);
      quantize_rows(head_.lm_head, rows, Range{row, row + 1});
    });
    gemm(head_.lm_head, rows, logits_, num_tokens(), Store::kOverwrite, team);
  }

  // Sample a token of each row, and begin the next step's rows.
  void sample(size_t index, ThreadTeam team) {
    const auto params_of = [&](int64_t row) {
      return drafts_.params_of(steps_[index].sequences[row], index);
    };
    const auto finish = [&](int64_t row, int32_t token) { finish_row(index, row, token); };
    const int64_t num_rows = steps_[index].sequences.size();
    if (!sampler_->sample(num_rows, logits_, params_of, finish, team)) has_failed_ = true;
  }

  // Write a token; a draft ends where no token can be sampled.
  void finish_row(size_t index, int64_t row, int32_t sampled) {
    const DraftStep& step = steps_[index];
    int32_t* token = drafts_.tokens + step.sequences[row] * drafts_.max_count + index;
    const bool has_ended = index > 0 && token[-1] < 0;
    *token = has_ended ? -1 : sampled;
    if (step.followers.empty() || step.followers[row] < 0) return;
    const int64_t size = head_.decoder.hidden_size, follower = step.followers[row];
    steps_[index + 1].input_ids[follower] = std::max(*token, 0);
    if (!head_.reads_features) return;
    std::copy_n(states_ + row * size, size, next_features_ + follower * size);
  }
};

}  // namespace specdec
