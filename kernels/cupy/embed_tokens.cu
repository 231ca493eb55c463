// Rows of an embedding, by token: a block a token.
//
//   table      (V, words)         of any type, in words
//   token_ids  int32 (M)          one that is not a token's, as of padding, is read as 0
//   rows       (M, words)         written in full
#include "common.cuh"

constexpr int32 THREADS = 256;

template <typename Word>
__device__ __forceinline__ void embed(const Word* table, const int32* token_ids, Word* rows, int32 words, int32 V)
{
    wait_for_earlier();
    const int32 token = token_ids[blockIdx.x];
    const Word* from = table + int64(token >= 0 && token < V ? token : 0) * words;
    Word* to = rows + int64(blockIdx.x) * words;
    for (int32 i = threadIdx.x; i < words; i += THREADS) to[i] = from[i];
}

#define EMBED(name, Word)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                     \
        const Word* table, const int32* token_ids, Word* rows, int32 words, int32 V)                                \
    {                                                                                                               \
        embed(table, token_ids, rows, words, V);                                                                    \
    }

EMBED(embed_tokens_2, unsigned short)
EMBED(embed_tokens_4, uint32)
EMBED(embed_tokens_16, uint4)
