// The forward pass of a decoder (`specdec/models/llama.py`) in one call.
//
// Activations are float32 for every data type of weights and KV. Each operation works on one row or
// sums over one row in a fixed order, so a token's hidden state is the same bits in any batch, with
// any chunking of its prompt and with any number of threads.
#pragma once

#include <cstdint>

#include "attention/batch.h"
#include "attention/kv_cache.h"
#include "collectives/allreduce.h"
#include "gemm/matrix.h"
#include "recurrence/recurrence.h"
#include "threads/thread_team.h"

namespace specdec {

enum class NormKind : int32_t { kRms = 0, kLayer = 1 };

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kRelu2 = 3, kXielu = 4 };

// What the norm of queries and keys covers (`QkNorm` in specdec/models/config/traits.py).
enum class QkNorm : int32_t { kHead = 0, kEachHead = 1, kAllHeads = 2 };

// A norm of hidden states; no norm where weight is null.
struct Norm {
  const float* weight;  // [hidden_size]
  const float* bias;    // [hidden_size], or null
};

// One expert of a mixture, as the MLP of a layer.
struct Expert {
  Matrix gate_up, down;
};

// Weights of latent attention (`LatentAttention` in specdec/models/layers/latent_attention.py).
struct LatentWeights {
  Matrix query_up;           // from the latent of queries to queries; unused without one
  const float* query_norm;   // [query_rank], or null
  const float* kv_norm;      // [rank]
  Matrix to_keys;            // of each head, [rank, plain_dim], as in StackedProducts
  Matrix to_values;          // of each head, [value_dim, rank]
};

struct Layer {
  // qkv: to gates, if any, queries, keys and values; with latents, to queries or their latents, and
  // to keys; with a recurrence, to its inputs and gates.
  Matrix qkv, output;
  Matrix gate_up;  // gate, then up projection; the latter only where the MLP has no gate
  Matrix down;
  Matrix router;          // [num_experts, hidden_size]
  const Expert* experts;  // [num_own_experts], in place of gate_up and down
  const Expert* shared;   // experts of every token, as one; or null
  const float* shared_gate;  // [hidden_size], whose product with a token gates `shared`; or null
  const float* choice_bias;  // [num_experts], added to the scores that choose experts; or null
  int64_t first_expert, num_own_experts;  // of the mixture, on this rank
  Norm input_norm, mlp_norm;
  Norm attention_output_norm, mlp_output_norm;
  const LatentWeights* latent;  // null without latents
  const RecurrentWeights* recurrent;  // in place of attention; or null
  const float* query_norm;  // [head_dim], of each head where heads have their own weights; or null
  const float* key_norm;
  const float* sinks;  // [num_heads], scores of a key without a value; or null
  const float* cos;  // [max_positions, rotary_dim / 2]; null where positions do not enter attention
  const float* sin;
  int64_t window;  // tokens up to a query that are visible to it, itself included; 0 for no limit
  int32_t sees_ahead;  // whether a query also sees the tokens after it in the pass
  const float* activation;    // [4], parameters of xIELU; or null
  const float* query_scales;  // [max_positions], factors of queries; or null
};

// How the layers of a family differ from Llama's (`DecoderTraits` in specdec/models/config/traits.py).
struct Traits {
  NormKind norm;
  QkNorm qk_norm;
  Activation activation;
  int32_t has_gate;
  int32_t has_attention_gate;  // whether the result of attention is multiplied by gates of values
  int32_t is_parallel;      // whether the MLP reads what attention reads
  float attention_scale;    // of scores
  float attention_softcap;  // of scores; 0 for none
  float embedding_scale, residual_scale;
  int32_t num_experts, experts_per_token;  // 0 without experts
  int32_t normalizes_experts;  // whether the weights of a token's experts have the sum 1
  int32_t scores_by_sigmoid;   // whether experts have sigmoids as scores, not a softmax
  int32_t num_expert_groups, num_chosen_groups;  // 1 and 1 without groups
  float routing_scale;                           // of the weights of experts
  int32_t adds_two_best;          // whether the score of a group is the sum of its two best
  int32_t rotates_before_norms;   // whether queries and keys are rotated before their norm
  int32_t scales_expert_inputs;   // whether weights of experts multiply inputs, not results
};

// Sizes of multi-head latent attention (`Latent` in specdec/models/config/traits.py); rank is 0 without it.
struct LatentShape {
  int64_t rank, query_rank, plain_dim, value_dim;
};

// This rank's rows of the embedding: a tied head's packed matrix, or a separate table.
struct Embedding {
  const void* packed;  // in the layout of packed_layout.h, or null
  const void* table;   // [num_tokens, hidden_size], or null
  Format format;
  int64_t first_token, num_tokens;
};

// Sums data [count] in place over ranks that share no memory; returns false when a peer is lost.
using AllReduce = bool (*)(float* data, int64_t count);

// One rank of a model. Sizes are this rank's, except hidden_size.
struct Decoder {
  int64_t hidden_size, num_hidden_units, num_expert_units, num_shared_units;
  int64_t num_heads, num_kv_heads, heads_per_kv, first_in_group;
  int64_t head_dim, rotary_dim, num_layers;
  int64_t num_model_heads, num_model_kv_heads;  // of all ranks
  int64_t first_counted_kv_head;  // this rank's KV heads that no rank before it has
  int64_t first_position;  // that has KV: 0, or 1 in a draft head
  float norm_eps;
  int32_t rank;
  Traits traits;
  LatentShape latent;
  RecurrentShape recurrent;
  Embedding embedding;
  const Layer* layers;      // [num_layers]
  Norm final_norm;
  Communicator* communicator;  // for ranks that share memory, else null
  AllReduce all_reduce;        // for other ranks, else null

  int64_t num_kv_layers() const { return num_layers - recurrent.num_layers; }
};

// Residual streams that a forward pass returns: those that enter some layers; num_layers is the
// output of the last layer, before the final norm.
struct Taps {
  const int64_t* layers;  // [count]
  int64_t count;
  float* output;  // [num_tokens, count, hidden_size]
};

// Result of a forward pass. After kPeerLost the output is undefined.
enum class PassResult : int32_t { kDone = 0, kPeerLost = 1, kNeedsMemory = 2 };

// Memory that passes work in. One that needs more than `size` bytes has no effect but `needed`.
struct Workspace {
  void* memory;
  int64_t size;
  int64_t needed;
};

// Run a pass, which was made with the memory of a workspace, by a function of the threads.
template <typename Pass, typename Run>
PassResult run_pass(Workspace* workspace, const Pass& pass, int32_t num_threads, const Run& run) {
  workspace->needed = pass.memory_bytes();
  if (workspace->needed > workspace->size) return PassResult::kNeedsMemory;
  run_parallel(num_threads, run);
  return pass.has_failed() ? PassResult::kPeerLost : PassResult::kDone;
}

// KV cache of all layers with attention, in their order: [num_kv_layers] of KvLayer.
struct KvCache {
  char* data;
  Format format;
  int64_t num_blocks;
};

// KV blocks of these layers that one pass has beside the cache: [num_kv_layers] of KvLayer's extra
// data.
struct ExtraKv {
  char* data = nullptr;
  int64_t num_blocks = 0;
};

}  // namespace specdec
