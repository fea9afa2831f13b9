// Entry points of block drafters: passes of a head, and drafts of several tokens.
#include "heads/block_head.h"

#include <numeric>

#include "heads/block_draft.h"
#include "heads/block_pass.h"
#include "heads/block_trees.h"

namespace specdec {
namespace {

PassResult result_of(bool has_failed) {
  return has_failed ? PassResult::kPeerLost : PassResult::kDone;
}

// Return all sequences of a batch if draft blocks are wanted, else none.
std::vector<int64_t> sequences_of(const Batch& pairs, int64_t num_outputs) {
  std::vector<int64_t> sequences(num_outputs ? pairs.num_sequences : 0);
  std::iota(sequences.begin(), sequences.end(), 0);
  return sequences;
}

}  // namespace
}  // namespace specdec

// Return the bytes of workspace that specdec_block_head_forward needs.
SPECDEC_EXPORT int64_t specdec_block_head_memory_bytes(const specdec::BlockHead* head,
                                                       const specdec::Batch* pairs,
                                                       const specdec::KvCache* cache,
                                                       int64_t num_outputs, int32_t num_threads) {
  return specdec::BlockPass(*head, *pairs, *cache, specdec::sequences_of(*pairs, num_outputs),
                            num_outputs, nullptr, num_threads)
      .memory_bytes();
}

// Write the KV of a context to the cache, and the outputs of a draft block after each sequence to
// outputs [num_outputs, num_sequences, hidden_size]; no block runs if num_outputs is 0. features:
// [num_pairs, hidden_size]. Return kNeedsMemory without effect when memory_bytes is too small.
SPECDEC_EXPORT specdec::PassResult specdec_block_head_forward(
    const specdec::BlockHead* head, const specdec::Batch* pairs, const specdec::KvCache* cache,
    void* memory, int64_t memory_bytes, const float* features, int64_t num_outputs, float* outputs,
    int32_t num_threads) {
  specdec::BlockPass pass(*head, *pairs, *cache, specdec::sequences_of(*pairs, num_outputs),
                          num_outputs, memory, num_threads);
  if (pass.memory_bytes() > memory_bytes) return specdec::PassResult::kNeedsMemory;
  specdec::run_parallel(num_threads,
                        [&](specdec::ThreadTeam team) { pass.run(features, outputs, team); });
  return specdec::result_of(pass.has_failed());
}

// Return the bytes of workspace that specdec_block_draft needs.
SPECDEC_EXPORT int64_t specdec_block_draft_memory_bytes(const specdec::BlockHead* head,
                                                        const specdec::Batch* pairs,
                                                        const specdec::KvCache* cache,
                                                        const specdec::Drafts* drafts,
                                                        int32_t num_threads) {
  return specdec::BlockDraft(*head, *pairs, *cache, *drafts, nullptr, num_threads).memory_bytes();
}

// Write the KV of a context to the cache, and draft tokens after the sequences whose count is
// above 0, at least one of them. features: [num_pairs, hidden_size]. Return kNeedsMemory
// without effect when memory_bytes is too small.
SPECDEC_EXPORT specdec::PassResult specdec_block_draft(
    const specdec::BlockHead* head, const specdec::Batch* pairs, const specdec::KvCache* cache,
    void* memory, int64_t memory_bytes, const specdec::Drafts* drafts, const float* features,
    int32_t num_threads) {
  specdec::BlockDraft draft(*head, *pairs, *cache, *drafts, memory, num_threads);
  if (draft.memory_bytes() > memory_bytes) return specdec::PassResult::kNeedsMemory;
  specdec::run_parallel(num_threads,
                        [&](specdec::ThreadTeam team) { draft.run(features, team); });
  return specdec::result_of(draft.has_failed());
}

// Return the bytes of workspace that specdec_block_trees needs.
SPECDEC_EXPORT int64_t specdec_block_trees_memory_bytes(const specdec::BlockHead* head,
                                                        const specdec::Batch* pairs,
                                                        const specdec::KvCache* cache,
                                                        const specdec::DraftTrees* trees,
                                                        int32_t num_threads) {
  return specdec::BlockTrees(*head, *pairs, *cache, *trees, nullptr, num_threads).memory_bytes();
}

// Draft trees as specdec_block_draft does chains, by one rank with a Markov head.
SPECDEC_EXPORT specdec::PassResult specdec_block_trees(
    const specdec::BlockHead* head, const specdec::Batch* pairs, const specdec::KvCache* cache,
    void* memory, int64_t memory_bytes, const specdec::DraftTrees* trees, const float* features,
    int32_t num_threads) {
  specdec::BlockTrees draft(*head, *pairs, *cache, *trees, memory, num_threads);
  if (draft.memory_bytes() > memory_bytes) return specdec::PassResult::kNeedsMemory;
  specdec::run_parallel(num_threads,
                        [&](specdec::ThreadTeam team) { draft.run(features, team); });
  return specdec::result_of(draft.has_failed());
}
