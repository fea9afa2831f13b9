// Draft heads with attention (EAGLE, layers for multi-token prediction), `DraftHead` in
// `specdec/models/heads/networks/base.py`; and draft models, which read no features.
//
// Pair j is token j of a sequence with the feature of token j - 1; its KV is in slot j. A pass runs
// pairs through a few layers. As in a decoder, a pair's result is the same bits in any batch.
#pragma once

#include <cstdint>

#include "decoder/decoder.h"

namespace specdec {

// One rank of a head or draft model. Where it has no such part, a norm is null and a matrix has no
// weights.
struct DraftHead {
  Decoder decoder;  // layers, embedding of tokens, rotary tables; first_position of a head is 1
  int32_t reads_features;  // 0 for a draft model: the layers' input is the token's embedding

  // The layers' input: a projection of [embedding | feature], its inputs divided over the ranks; or
  // else the feature, where the first layer projects [embedding | feature] to queries, keys, values.
  Matrix fusion;                // [hidden_size, this rank's inputs]
  int64_t first_input;          // of this rank
  const float* embedding_norm;  // [hidden_size]
  const float* feature_norm;    // [hidden_size]
  int32_t is_feature_first;     // whether the input is [feature | embedding]
  int32_t adds_to_normed;       // whether the residual stream begins with the normalized feature
  int32_t returns_normed;       // whether the feature of a draft token is after the final norm

  Matrix lm_head;                // [num_tokens, hidden_size], this rank's draft tokens
  const int32_t* target_tokens;  // [num_tokens], ascending
};

}  // namespace specdec
