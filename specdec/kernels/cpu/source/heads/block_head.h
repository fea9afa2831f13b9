// Block drafters (DFlash, DSpark): `DFlashHead` in `specdec/models/heads/networks/dflash.py`.
//
// A draft block has an anchor, the last known token of a sequence, and masks after it. Its tokens
// attend to each other and to the context: keys and values that each layer projects from the
// target's features. As in a decoder, a block's result is the same bits in any batch.
#pragma once

#include <cstdint>

#include "decoder/decoder.h"

namespace specdec {

enum class MarkovKind : int32_t { kNone = 0, kVanilla = 1, kGated = 2, kRecurrent = 3 };

// One rank of DSpark's correction of logits by the token before, `MarkovHead` in
// `specdec/models/heads/networks/markov.py`.
struct Markov {
  MarkovKind kind;
  int64_t size;         // of the latent state
  Embedding embedding;  // W1: [target's tokens, size]
  Matrix output;        // W2: [num_tokens, size], this rank's draft tokens

  // Its inputs, which are divided over the ranks: of kGated, [block output | embedding], with
  // `size` outputs; of kRecurrent, [memory | embedding | block output], with 3 * size outputs.
  Matrix projection;
  int64_t first_input;  // of this rank
};

// One rank of a block drafter.
struct BlockHead {
  Decoder decoder;           // layers, embedding, rotary tables; first_position is 1
  int64_t draft_block_size;  // anchor included
  int64_t first_output;      // of a draft block that predicts: 0, or 1 without the anchor
  int32_t mask_token;
  Matrix lm_head;                // [num_tokens, hidden_size], this rank's draft tokens
  const int32_t* target_tokens;  // [num_tokens], ascending
  Markov markov;
};

}  // namespace specdec
