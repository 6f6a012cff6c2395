/* LEVEL_BODY at the level whose macros are defined; they are not after it. */
#include LEVEL_BODY
#undef INLINE
#undef LEVEL
#undef LEVEL_NAME
#undef TARGET
#undef VECTOR
#undef AVX2
