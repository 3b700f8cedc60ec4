"""The quantities that prices are written in, each with its unit and meaning."""

from __future__ import annotations

from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class Quantity:
    """A symbol of the formulas: what it measures, in which unit."""

    symbol: sympy.Symbol
    unit: str
    meaning: str


QUANTITIES: dict[str, Quantity] = {}  # by name, in order of definition


def _quantity(name: str, unit: str, meaning: str) -> sympy.Symbol:
    symbol = sympy.Symbol(name, nonnegative=True)
    QUANTITIES[name] = Quantity(symbol, unit, meaning)
    return symbol


# What is computed ---------------------------------------------------------------------------------

B = _quantity("B", "sequences", "batch")
S = _quantity("S", "positions", "length of the queries' sequence")
T = _quantity("T", "positions", "length of the keys' sequence")
H = _quantity("H", "heads", "query heads; of linear attention, heads that each have a state")
H_kv = _quantity("H_kv", "heads", "key and value heads")
D = _quantity("D", "numbers", "size of a query's and a key's head; rows of a state")
D_v = _quantity("D_v", "numbers", "size of a value's head; columns of a state")
e = _quantity("e", "B", "bytes of a number of the activations")
a = _quantity("a", "B", "bytes of a number that is summed up, and of a state's")
P = _quantity("P", "ranks", "ranks that share a sequence")
G = _quantity("G", "ranks", "ranks of them in one node")
u = _quantity("u", "ranks", "ranks that exchange heads")
G_u = _quantity("G_u", "ranks", "ranks of those in one node")
rho = _quantity("rho", "1", "share of the (query, key) pairs that the mask leaves")

# What a strategy moves, counted on the intervals that ranks hold and on the mask ---------------------

N = _quantity("N", "pairs", "(query, key, head) triples that the busiest rank computes")
m = _quantity("m", "positions", "positions whose keys and values one rank sends, as the mean over ranks")
r = _quantity("r", "positions", "positions whose queries one rank sends, as the mean over ranks")
x = _quantity("x", "positions", "(position, head) pairs one rank sends in exchange for heads, as the mean over ranks")
x_k = _quantity("x_k", "positions", "of x, pairs of keys")
t = _quantity("t", "turns", "turns in which an all-to-all's ranks compute their heads")
y = _quantity("y", "1", "1 where each turn has key and value heads of its own, 0 where all share them")
n = _quantity("n", "steps", "steps in which blocks travel")
k_0 = _quantity("k_0", "calls", "calls of the kernel for a rank's own block: one for each part that mask or layout cuts it into")
h_r = _quantity("h_r", "heads", "heads of keys and values that are copied for queries, where rows are computed by blocks; else 0")
N_0 = _quantity("N_0", "pairs", "of N, in the first step, whose blocks are its own")
N_l = _quantity("N_l", "pairs", "of N, in the last step")
b_f = _quantity("b_f", "B", "bytes of a step's blocks through the busiest port, forward")
g_f = _quantity("g_f", "B", "the same of a step's results, on their way back")
d_f = _quantity("d_f", "B", "of both in one direction, where blocks of one step pass together with results of another")
b_b = _quantity("b_b", "B", "as b_f, backward")
g_b = _quantity("g_b", "B", "as g_f, backward")
d_b = _quantity("d_b", "B", "as d_f, backward")
c = _quantity("c", "B", "bytes of one position's keys and values as they travel")

# Linear attention -----------------------------------------------------------------------------------

C = _quantity("C", "positions", "positions of a chunk")
K_b = _quantity("K_b", "blocks", "blocks in which a chain sends a state")
f = _quantity("f", "FLOP", "work of one rank on its own tokens, forward")
f_s = _quantity("f_s", "FLOP", "of that, the passage of a state through the rank's chunks, where it must wait for the state")
f_i = _quantity("f_i", "FLOP", "of f, what a rank computes while a state travels")
f_A = _quantity("f_A", "FLOP", "passage of the identity through the rank's chunks, to know what it does to any state")
f_c = _quantity("f_c", "FLOP", "work of doing to a state what one rank does, where that is a matrix")
s = _quantity("s", "B", "bytes of a state")
s_A = _quantity("s_A", "B", "bytes of a state and of what a rank does to any state")
s_c = _quantity("s_c", "B", "bytes of what a rank's chunks compute for backward: pairs of tokens, states found, solutions")
s_b = _quantity("s_b", "B", "bytes of gradients in a rank's chunks, summed in a state's type: of states, of tokens")
n_s = _quantity("n_s", "states", "states that one rank sends, as the mean over ranks")
n_A = _quantity("n_A", "states", "pairs (A, state) that one rank sends, as the mean over ranks")
w = _quantity("w", "B", "bytes of what one token has: queries, keys, values, decays, and of the result")
n_x = _quantity("n_x", "tensors", "tensors of tokens that change hands: queries, keys, values, decays, what they remove, results")
z = _quantity("z", "1", "share of the tokens that another rank holds in contiguous order; 0 where they lie in that order")

# The machine ------------------------------------------------------------------------------------------

F_f = _quantity("F_f", "FLOP/s", "rate of the forward kernel")
F_b = _quantity("F_b", "FLOP/s", "rate of the backward kernel")
tau = _quantity("tau", "s", "seconds to call a forward kernel; of linear attention, all that it takes")
tau_b = _quantity("tau_b", "s", "the same of backward")
beta_m = _quantity("beta_m", "B/s", "bytes a rank reads and writes in its memory")
omega = _quantity("omega", "1", "how many times as fast a rank computes while all others wait")
phi = _quantity("phi", "1", "share of a transfer that costs nothing while a kernel runs")
alpha_x = _quantity("alpha_x", "s", "latency of an all-to-all")
gamma_x = _quantity("gamma_x", "s", "the same for each other rank of the node")
gamma_xf = _quantity("gamma_xf", "s", "the same for each rank of other nodes")
beta_x = _quantity("beta_x", "B/s", "bytes a rank sends in an all-to-all inside its node")
beta_xf = _quantity("beta_xf", "B/s", "bytes a rank sends in an all-to-all to other nodes")
alpha_g = _quantity("alpha_g", "s", "latency of an all-gather")
gamma_g = _quantity("gamma_g", "s", "the same for each other rank")
beta_g = _quantity("beta_g", "B/s", "bytes a rank sends in an all-gather, over the slowest link on the way")
alpha_s = _quantity("alpha_s", "s", "latency of a reduce-scatter")
gamma_s = _quantity("gamma_s", "s", "the same for each other rank")
beta_s = _quantity("beta_s", "B/s", "bytes a rank sends in a reduce-scatter, over the slowest link on the way")
gamma_h = _quantity("gamma_h", "s", "latency of a message to a neighbour")
beta_h = _quantity("beta_h", "B/s", "bytes a rank sends to a neighbour, over the slowest link of the ring")
gamma_n = _quantity("gamma_n", "s", "latency of a message inside a node")
beta_n = _quantity("beta_n", "B/s", "bytes a rank sends to a neighbour inside a node")
