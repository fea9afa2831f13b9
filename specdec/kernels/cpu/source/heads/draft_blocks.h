// The batch of draft blocks after some sequences, and where their KV is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention/batch.h"
#include "attention/kv_cache.h"
#include "decoder/lora.h"
#include "heads/block_head.h"

namespace specdec {

// A KV block of the cache, and the extra block that continues it.
struct BlockCopy {
  int64_t source, target;
};

// Draft blocks of `sequences`. Their KV is used once, and sequences have no slots for it: it is in
// extra blocks, which begin with the context's last block where that is not full.
class DraftBlocks {
 public:
  DraftBlocks(const BlockHead& head, const Batch& pairs, int64_t num_cache_blocks,
              std::vector<int64_t> sequences)
      : sequences_(std::move(sequences)), num_cache_blocks_(num_cache_blocks) {
    for (int64_t sequence : sequences_) add(head, pairs, sequence);
    query_starts_.push_back(input_ids_.size());
    for (const auto& table : block_tables_) table_addresses_.push_back(table.data());
    batch_ = pairs;
    batch_.num_tokens = input_ids_.size();
    batch_.num_sequences = sequences_.size();
    batch_.input_ids = input_ids_.data();
    batch_.query_starts = query_starts_.data();
    batch_.context_lens = context_lens_.data();
    batch_.block_tables = table_addresses_.data();
    adapters_.set(batch_);
  }
  DraftBlocks(const DraftBlocks&) = delete;  // the batch points to its members

  const std::vector<int64_t>& sequences() const { return sequences_; }
  const Batch& batch() const { return batch_; }
  const std::vector<BlockCopy>& copies() const { return copies_; }
  int64_t num_extra_blocks() const { return num_extra_blocks_; }

  // Return the last known token of a draft block's sequence.
  int32_t anchor(int64_t index) const { return input_ids_[query_starts_[index]]; }

 private:
  std::vector<int64_t> sequences_;
  int64_t num_cache_blocks_, num_extra_blocks_ = 0;
  std::vector<int32_t> input_ids_, query_starts_, context_lens_;
  std::vector<std::vector<int32_t>> block_tables_;
  std::vector<const int32_t*> table_addresses_;
  std::vector<BlockCopy> copies_;
  AdapterRuns adapters_;
  Batch batch_;

  void add(const BlockHead& head, const Batch& pairs, int64_t sequence) {
    const int64_t context = pairs.context_lens[sequence], size = head.draft_block_size;
    query_starts_.push_back(input_ids_.size());
    input_ids_.push_back(pairs.input_ids[pairs.query_starts[sequence + 1] - 1]);
    input_ids_.insert(input_ids_.end(), size - 1, head.mask_token);
    context_lens_.push_back(context + size);
    adapters_.add(pairs, pairs.query_starts[sequence], size);
    const int32_t* const table = pairs.block_tables[sequence];
    const int64_t num_full = context / pairs.block_size, num_left = context % pairs.block_size;
    if (num_left) copies_.push_back({table[num_full], num_cache_blocks_ + num_extra_blocks_});
    auto& own = block_tables_.emplace_back(table, table + num_full);
    for (int64_t begin = 0; begin < num_left + size; begin += pairs.block_size) {
      own.push_back(num_cache_blocks_ + num_extra_blocks_++);
    }
  }
};

}  // namespace specdec
