// One pass of a block drafter: the KV of its context, and the outputs of draft blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "base/arena.h"
#include "base/elementwise.h"
#include "decoder/forward_pass.h"
#include "heads/context_pass.h"
#include "heads/draft_blocks.h"

namespace specdec {

// All threads of a team call `run`.
class BlockPass {
 public:
  // pairs: the tokens whose context is new. sequences: those with a draft block after their pairs.
  // num_outputs: of each draft block. memory: null to count the bytes only.
  BlockPass(const BlockHead& head, const Batch& pairs, KvCache cache,
            std::vector<int64_t> sequences, int64_t num_outputs, void* memory, int num_threads)
      : head_(head), num_outputs_(num_outputs),
        blocks_(head, pairs, cache.num_blocks, std::move(sequences)), arena_(memory) {
    const ExtraKv extra = {allocate_kv(pairs, cache.format), blocks_.num_extra_blocks()};
    context_.emplace(head.decoder, pairs, cache, arena_.rest());
    int64_t pass_bytes = context_->memory_bytes();
    if (num_blocks() > 0) {
      drafting_.emplace(head.decoder, blocks_.batch(), cache, arena_.rest(), num_threads, extra);
      pass_bytes = std::max(pass_bytes, drafting_->memory_bytes());
    }
    memory_bytes_ = arena_.used() + pass_bytes;
  }

  int64_t memory_bytes() const { return memory_bytes_; }
  bool has_failed() const { return drafting_ && drafting_->has_failed(); }
  const DraftBlocks& blocks() const { return blocks_; }
  int64_t num_blocks() const { return blocks_.sequences().size(); }

  // Write the KV of the context, and the outputs of draft blocks, after the final norm. features:
  // [num_pairs, hidden_size], the context. outputs: [num_outputs, num_blocks, hidden_size].
  void run(const float* features, float* outputs, ThreadTeam team) {
    context_->run(features, team);
    if (!drafting_) return;
    copy_blocks(team);
    drafting_->embed(team);
    drafting_->run_layers(nullptr, team);
    const int64_t size = head_.decoder.hidden_size;
    team.parallel_for(num_outputs_ * num_blocks(), [&](int64_t row) {
      const int64_t slot = head_.first_output + row / num_blocks();
      const int64_t token = row % num_blocks() * head_.draft_block_size + slot;
      rms_norm(drafting_->residual() + token * size, head_.decoder.final_norm.weight,
               head_.decoder.norm_eps, size, outputs + row * size);
    });
  }

 private:
  const BlockHead& head_;
  int64_t num_outputs_;
  DraftBlocks blocks_;
  Arena arena_;
  std::optional<ContextPass> context_;
  std::optional<ForwardPass> drafting_;  // shares memory with the context's pass
  int64_t memory_bytes_;

  // Allocate the extra KV blocks of all layers.
  char* allocate_kv(const Batch& pairs, Format format) {
    const Decoder& decoder = head_.decoder;
    KvLayer kv = {nullptr, format, decoder.num_kv_heads, 0, pairs.block_size, decoder.head_dim};
    kv.num_extra_blocks = blocks_.num_extra_blocks();
    return static_cast<char*>(arena_.allocate(decoder.num_layers * kv.num_extra_bytes()));
  }

  // Run a stage that copies the context's last blocks, which the draft blocks continue.
  void copy_blocks(ThreadTeam team) {
    const auto& copies = blocks_.copies();
    const int64_t num_heads = head_.decoder.num_kv_heads, count = copies.size();
    team.parallel_for(count * head_.decoder.num_layers, [&](int64_t index) {
      const KvLayer kv = drafting_->kv_layer(index / count);
      const BlockCopy copy = copies[index % count];
      for (int64_t head = 0; head < num_heads; ++head) {
        std::memcpy(kv.keys(head, copy.target), kv.keys(head, copy.source), kv.block_bytes());
      }
    });
  }
};

}  // namespace specdec
