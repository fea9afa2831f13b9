// Entry points of draft heads with attention: passes, and drafts of several tokens.
#include "heads/draft_head.h"

#include "heads/draft_run.h"
#include "heads/pair_pass.h"

namespace specdec {
namespace {

PassResult result_of(bool has_failed) {
  return has_failed ? PassResult::kPeerLost : PassResult::kDone;
}

}  // namespace
}  // namespace specdec

// Return the bytes of workspace that specdec_draft_head_forward needs.
SPECDEC_EXPORT int64_t specdec_draft_head_memory_bytes(const specdec::DraftHead* head,
                                                       const specdec::Batch* pairs,
                                                       int32_t num_threads) {
  return specdec::PairPass(*head, *pairs, {}, nullptr, num_threads).memory_bytes();
}

// Write the KV of pairs to the cache, and the states after some of them to hidden and next_features
// [num_states, hidden_size]. features: [num_pairs, hidden_size]. states: the pairs, [num_states].
// Return kNeedsMemory without effect when memory_bytes is too small.
SPECDEC_EXPORT specdec::PassResult specdec_draft_head_forward(
    const specdec::DraftHead* head, const specdec::Batch* pairs, const specdec::KvCache* cache,
    void* memory, int64_t memory_bytes, const float* features, const int32_t* states,
    int64_t num_states, float* hidden, float* next_features, int32_t num_threads) {
  specdec::PairPass pass(*head, *pairs, *cache, memory, num_threads);
  if (pass.memory_bytes() > memory_bytes) return specdec::PassResult::kNeedsMemory;
  const int64_t size = head->decoder.hidden_size;
  specdec::run_parallel(num_threads, [&](specdec::ThreadTeam team) {
    pass.run(features, team);
    team.parallel_for(num_states, [&](int64_t state) {
      pass.write_state(states[state], hidden + state * size, next_features + state * size);
    });
  });
  return specdec::result_of(pass.has_failed());
}

// Return the bytes of workspace that specdec_draft needs.
SPECDEC_EXPORT int64_t specdec_draft_memory_bytes(const specdec::DraftHead* head,
                                                  const specdec::Batch* pairs,
                                                  const specdec::Drafts* drafts,
                                                  int32_t num_threads) {
  return specdec::DraftRun(*head, *pairs, {}, *drafts, nullptr, num_threads).memory_bytes();
}

// Write the KV of pairs to the cache, and draft tokens after them; their own KV follows in the
// slots after the pairs. features: [num_pairs, hidden_size]; null for a draft model. Return
// kNeedsMemory without effect when memory_bytes is too small.
SPECDEC_EXPORT specdec::PassResult specdec_draft(const specdec::DraftHead* head,
                                                 const specdec::Batch* pairs,
                                                 const specdec::KvCache* cache, void* memory,
                                                 int64_t memory_bytes,
                                                 const specdec::Drafts* drafts,
                                                 const float* features, int32_t num_threads) {
  specdec::DraftRun run(*head, *pairs, *cache, *drafts, memory, num_threads);
  if (run.memory_bytes() > memory_bytes) return specdec::PassResult::kNeedsMemory;
  specdec::run_parallel(num_threads, [&](specdec::ThreadTeam team) { run.run(features, team); });
  return specdec::result_of(run.has_failed());
}
