"""Sums of which nobody sees a part: pairwise masks that cancel out (Bonawitz and others, 2017).

Machines without I/O: `SecureClient` has a vector of whole numbers, `SecureServer` comes to the sum of those that
stayed, and to nothing else. One round, in four phases, at whose ends clients may be gone:

1. keys: every client shows two public keys, made for this round alone;
2. shares: every client cuts two secrets into shares, one for each other client, sealed for that one alone;
3. inputs: every client sends its vector with a mask of its own and one for each other client; the latter cancel
   out in the sum, where both clients stay;
4. unmasking: those that are left give their shares: of those who stayed that of their own mask, of those who are
   gone that of the key which their masks with others follow from. Never both of one client.

`docs/privacy.md` says against whom that protects, and against whom not.
"""

from shoal.comm.secure_sum.client import SecureClient
from shoal.comm.secure_sum.fixed_point import FixedPoint
from shoal.comm.secure_sum.messages import MaskedInput, PublicKeys, SealedShares, UnmaskingShares
from shoal.comm.secure_sum.server import SecureServer

__all__ = [
    "FixedPoint",
    "MaskedInput",
    "PublicKeys",
    "SealedShares",
    "SecureClient",
    "SecureServer",
    "UnmaskingShares",
]
