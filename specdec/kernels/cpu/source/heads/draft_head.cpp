// Entry points of draft heads with attention: passes, and drafts of several tokens.
#include "heads/draft_head.h"

#include "heads/draft_run.h"
#include "heads/pair_pass.h"

// Write the KV of pairs to the cache, and the states after some of them to hidden and next_features
// [num_states, hidden_size]. features: [num_pairs, hidden_size]. states: the pairs, [num_states].
SPECDEC_EXPORT specdec::PassResult specdec_draft_head_forward(
    specdec::Workspace* workspace, const specdec::DraftHead* head, const specdec::Batch* pairs,
    const specdec::KvCache* cache, const float* features, const int32_t* states, int64_t num_states,
    float* hidden, float* next_features, int32_t num_threads) {
  specdec::PairPass pass(*head, *pairs, *cache, workspace->memory, num_threads);
  const int64_t size = head->decoder.hidden_size;
  return specdec::run_pass(workspace, pass, num_threads, [&](specdec::ThreadTeam team) {
    pass.run(features, team);
    team.parallel_for(num_states, [&](int64_t state) {
      pass.write_state(states[state], hidden + state * size, next_features + state * size);
    });
  });
}

// Write the KV of pairs to the cache, and draft tokens after them; their own KV follows in the
// slots after the pairs. features: [num_pairs, hidden_size]; null for a draft model.
SPECDEC_EXPORT specdec::PassResult specdec_draft(
    specdec::Workspace* workspace, const specdec::DraftHead* head, const specdec::Batch* pairs,
    const specdec::KvCache* cache, const specdec::Drafts* drafts, const float* features,
    int32_t num_threads) {
  specdec::DraftRun run(*head, *pairs, *cache, *drafts, workspace->memory, num_threads);
  return specdec::run_pass(workspace, run, num_threads,
                           [&](specdec::ThreadTeam team) { run.run(features, team); });
}
