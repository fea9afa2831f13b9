// Entry points of block drafters: passes of a head, and drafts of several tokens.
#include "heads/block_head.h"

#include <numeric>

#include "heads/block_draft.h"
#include "heads/block_pass.h"
#include "heads/block_trees.h"

// Write the KV of a context to the cache, and the outputs of a draft block after each sequence to
// outputs [num_outputs, num_sequences, hidden_size]; no block runs if num_outputs is 0. features:
// [num_pairs, hidden_size].
SPECDEC_EXPORT specdec::PassResult specdec_block_head_forward(
    specdec::Workspace* workspace, const specdec::BlockHead* head, const specdec::Batch* pairs,
    const specdec::KvCache* cache, const float* features, int64_t num_outputs, float* outputs,
    int32_t num_threads) {
  std::vector<int64_t> sequences(num_outputs ? pairs->num_sequences : 0);
  std::iota(sequences.begin(), sequences.end(), 0);
  specdec::BlockPass pass(*head, *pairs, *cache, sequences, num_outputs, workspace->memory,
                          num_threads);
  return specdec::run_pass(workspace, pass, num_threads, [&](specdec::ThreadTeam team) {
    pass.run(features, outputs, team);
  });
}

// Write the KV of a context to the cache, and draft tokens after the sequences whose count is
// above 0, at least one of them. features: [num_pairs, hidden_size].
SPECDEC_EXPORT specdec::PassResult specdec_block_draft(
    specdec::Workspace* workspace, const specdec::BlockHead* head, const specdec::Batch* pairs,
    const specdec::KvCache* cache, const specdec::Drafts* drafts, const float* features,
    int32_t num_threads) {
  specdec::BlockDraft draft(*head, *pairs, *cache, *drafts, workspace->memory, num_threads);
  return specdec::run_pass(workspace, draft, num_threads,
                           [&](specdec::ThreadTeam team) { draft.run(features, team); });
}

// Draft trees as specdec_block_draft does chains, by one rank with a Markov head.
SPECDEC_EXPORT specdec::PassResult specdec_block_trees(
    specdec::Workspace* workspace, const specdec::BlockHead* head, const specdec::Batch* pairs,
    const specdec::KvCache* cache, const specdec::DraftTrees* trees, const float* features,
    int32_t num_threads) {
  specdec::BlockTrees draft(*head, *pairs, *cache, *trees, workspace->memory, num_threads);
  return specdec::run_pass(workspace, draft, num_threads,
                           [&](specdec::ThreadTeam team) { draft.run(features, team); });
}
