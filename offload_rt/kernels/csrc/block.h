// Constants shared by the matrix products and the softmax between them.

#pragma once

constexpr int BLOCK = 256;      // tokens scored at a time
constexpr int QUERY_TILE = 64;  // queries that share one transposition of a block of keys
constexpr float LOG2E = 1.4426950408889634f;  // scores are exponents of 2
