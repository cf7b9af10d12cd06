// What the products and the softmax between them share.

#pragma once

constexpr int BLOCK = 128;      // tokens whose scores are held at a time
constexpr int QUERY_TILE = 64;  // queries that share one transposition of a block of keys
constexpr float LOG2E = 1.4426950408889634f;  // scores are in powers of two
