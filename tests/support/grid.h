/* Grids of problems in which every option meets several values of every other: case i draws each option from a list by
 * a random number of (i, option). */
#ifndef GDELTA_TESTS_GRID_H
#define GDELTA_TESTS_GRID_H

#include "case.h"

typedef enum grid {
    kEveryProblem,
    kTiles,   /* what engines that work on tiles and chunks of 64 tokens can do, with lengths around theirs */
    kAnything /* every problem or tiles, with sizes, lengths and head ratios that no list has */
} grid;

test_case grid_case(grid grid, int i);

/* The operations that the case has inputs for, as check_case takes them. */
unsigned grid_operations(const test_case *c);

#endif /* GDELTA_TESTS_GRID_H */
