// Names for integers of 64 bits.
#pragma once

using i64 = long long;
using u64 = unsigned long long;
