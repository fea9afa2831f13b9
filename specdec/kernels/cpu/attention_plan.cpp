// How the attention of a batch is divided: evenly by cost, between any two segments.
#include <cassert>

#include "attention.h"

namespace specdec {

namespace {

constexpr int64_t kCostOfKv = 4;  // reading and unpacking a position costs as much as 4 queries
constexpr int64_t kSharesPerThread = 4;
constexpr int64_t kFewSegments = 4;  // of a thread: fewer may divide badly
constexpr int64_t kMostParts = 4;    // of a block of tokens

}  // namespace

AttentionPlan::AttentionPlan(const Batch& batch, AttentionShape shape, int64_t window,
                             int64_t num_threads)
    : batch_(batch),
      shape_(shape),
      window_(window),
      num_threads_(num_threads),
      num_shares_(num_threads > 1 ? num_threads * kSharesPerThread : 1) {
  add_all_chains(1);
  const bool has_blocks = batch.num_tokens > batch.num_sequences;  // of more than one token
  if (has_blocks && num_threads > 1 && count_segments() < kFewSegments * num_threads) cut_blocks();
  for (int64_t share = 0; share <= num_shares_; ++share) boundaries_.push_back(boundary(share));
  for (int64_t share = 0; share < num_shares_; ++share) {
    const Boundary begin = boundaries_[share];
    if (begin.segment == 0) continue;
    const Range segments = segments_of(share, begin.chain);
    most_apart_ = std::max(most_apart_, segments.end - segments.begin);
  }
}

int64_t AttentionPlan::count_segments() const {
  int64_t count = 0;
  for (const Chain& chain : chains_) count += chain.num_segments;
  return count;
}

// What the thread with the most segments has to do, were all alike.
int64_t AttentionPlan::longest_cost() const {
  const int64_t count = count_segments();
  assert(count > 0);  // a batch has tokens
  return divide_up(count, num_threads_) * (total_cost_ / count);
}

// Cuts blocks of tokens, each part of which reads the KV again, where threads are through sooner so:
// with three chains on two of them one would wait for the other half of the time.
void AttentionPlan::cut_blocks() {
  int64_t best = 1, least_cost = longest_cost();
  for (int64_t parts = 2; parts <= kMostParts; ++parts) {
    add_all_chains(parts);
    const int64_t cost = longest_cost();
    if (cost < least_cost) best = parts, least_cost = cost;
  }
  add_all_chains(best);
}

// Blocks of tokens that read the same KV follow each other, so that the cache still has it.
void AttentionPlan::add_all_chains(int64_t parts_of_block) {
  chains_.clear();
  total_cost_ = 0;
  for (int64_t sequence = 0; sequence < batch_.num_sequences; ++sequence) {
    const int64_t begin = batch_.query_starts[sequence], end = batch_.query_starts[sequence + 1];
    const int64_t most_tokens =
        divide_up(std::min(shape_.tokens_per_block(), end - begin), parts_of_block);
    for (int64_t kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
      for (int64_t first = begin; first < end; first += most_tokens) {
        add_chain(sequence, kv_head, {first, std::min(first + most_tokens, end)});
      }
    }
  }
}

void AttentionPlan::add_chain(int64_t sequence, int64_t kv_head, Range tokens) {
  const int64_t num_tokens = tokens.end - tokens.begin;
  const int64_t position =
      batch_.context_lens[sequence] - (batch_.query_starts[sequence + 1] - tokens.begin);
  const int64_t first_seen = window_ ? std::max<int64_t>(0, position - window_ + 1) : 0;
  const int64_t first_segment = first_seen / kSegment;
  const int64_t num_segments = (position + num_tokens - 1) / kSegment - first_segment + 1;
  const int64_t num_seen = (position + num_tokens - first_seen) / num_segments;
  const Range heads = shape_.heads_of(kv_head);
  const int64_t num_queries = num_tokens * (heads.end - heads.begin);
  const int64_t cost = num_seen * (num_queries + kCostOfKv);
  chains_.push_back({sequence, kv_head, heads, tokens.begin, num_tokens, position, first_segment,
                     num_segments, cost, total_cost_});
  total_cost_ += num_segments * cost;
}

Boundary AttentionPlan::boundary(int64_t share) const {
  const int64_t num_chains = chains_.size();
  if (share == num_shares_) return {num_chains, 0};
  const int64_t cost = total_cost_ * share / num_shares_;
  const auto later = std::upper_bound(
      chains_.begin(), chains_.end(), cost,
      [](int64_t value, const Chain& chain) { return value < chain.cost_before; });
  const int64_t index = later - chains_.begin() - 1;
  const Chain& chain = chains_[index];
  const int64_t segment = (cost - chain.cost_before + chain.segment_cost / 2) / chain.segment_cost;
  return segment < chain.num_segments ? Boundary{index, segment} : Boundary{index + 1, 0};
}

Range AttentionPlan::segments_of(int64_t share, int64_t chain) const {
  const Boundary begin = boundaries_[share], end = boundaries_[share + 1];
  if (chain < begin.chain || chain > end.chain || chain == int64_t(chains_.size())) return {0, 0};
  return {chain == begin.chain ? begin.segment : 0,
          chain == end.chain ? end.segment : chains_[chain].num_segments};
}

int64_t AttentionPlan::left_open(int64_t share) const {
  const int64_t chain = boundaries_[share + 1].chain;
  const Range segments = segments_of(share, chain);
  return segments.begin == 0 && segments.end > 0 ? chain : -1;
}

}  // namespace specdec
