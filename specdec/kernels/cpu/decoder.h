// A whole forward pass of a decoder (`specdec/models/llama.py`) in one call.
//
// Activations are float32 whatever the weights and the KV are. Every step works on a row by itself
// or sums over a row in one fixed order, so a token's hidden state is the same bits whatever else
// is in the batch, however its prompt was divided into chunks, and on any number of threads.
#pragma once

#include <cstdint>

#include "allreduce.h"
#include "batch.h"
#include "kv_cache.h"
#include "matrix.h"

namespace specdec {

struct Layer {
  Matrix qkv, output, gate_up, down;
  const float* input_norm;  // [hidden_size]
  const float* mlp_norm;    // [hidden_size]
  const float* query_norm;  // [head_dim], or null; so key_norm
  const float* key_norm;
  int64_t window;  // how many tokens a query sees, itself included; 0 for all before it
};

// This rank's rows of the embedding: those of a tied head's matrix, or a table of their own.
struct Embedding {
  const void* packed;  // as panels.h lays them out, or null
  const void* table;   // [num_tokens, hidden_size], or null
  Format format;
  int64_t first_token, num_tokens;
};

// Sums [count] floats over ranks that share no memory, in place; false once a peer is lost.
using AllReduce = bool (*)(float* data, int64_t count);

// One rank of a model. The sizes are this rank's, but for those of all hidden states.
struct Decoder {
  int64_t hidden_size, num_hidden_units, num_heads, num_kv_heads, heads_per_kv, first_in_group;
  int64_t head_dim, num_layers;
  float norm_eps;
  int32_t rank;
  Embedding embedding;
  const Layer* layers;      // [num_layers]
  const float* final_norm;  // [hidden_size]
  const float* cos;         // [max_positions, head_dim / 2]; so sin
  const float* sin;
  Communicator* communicator;  // of ranks that share memory, else null
  AllReduce all_reduce;        // of other ranks, else null
};

// What came of a pass. Where a peer was lost, what was written is of no use.
enum class PassResult : int32_t { kDone = 0, kPeerLost = 1, kNeedsMemory = 2 };

// The pool: layer after layer, as KvLayer says.
struct KvCache {
  char* data;
  Format format;
  int64_t num_blocks;
};

}  // namespace specdec
