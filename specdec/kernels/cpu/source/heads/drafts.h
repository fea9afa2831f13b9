// Drafts that a head makes after the sequences of a batch.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/draft_sampler.h"

namespace specdec {

// Drafts of different lengths.
struct Drafts {
  const int32_t* counts;                 // [num_sequences], tokens to draft
  const sampling::SampleParams* params;  // [num_sequences], at the position of the first token
  int32_t* tokens;  // [num_sequences, max_count], of the target's vocabulary; -1 past the end
  int64_t max_count;

  // Return the sequences, of the first `num_sequences`, that draft.
  std::vector<int64_t> drafting(int64_t num_sequences) const {
    std::vector<int64_t> sequences;
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
      if (counts[sequence] > 0) sequences.push_back(sequence);
    }
    return sequences;
  }

  // Return the parameters of token `index` of a draft.
  sampling::SampleParams params_of(int64_t sequence, int64_t index) const {
    sampling::SampleParams own = params[sequence];
    own.position += static_cast<uint32_t>(index);
    return own;
  }
};

// Trees: `drafts` has their nodes, as in `specdec/types/drafts/draft_tree.py`.
struct DraftTrees {
  Drafts drafts;
  const int32_t* depths;  // [num_sequences], the most nodes that follow each other
  int32_t* parents;       // [num_sequences, max_count], of the nodes
  int64_t max_depth;
};

}  // namespace specdec
