# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks by log-probabilities that a server serves the weights that were pushed to it.

The server must rate fixed tokens as the trainer does. This is stronger evidence than the
version that the server reports, because the compared numbers are computed from the weights.
Dropout is off and no token is sampled, so both sides compute the same numbers up to the
rounding of their kernels.
"""

from torchtitan.grpo.attestation.comparison import (
    Attestation,
    AttestationFailed,
    ServerAttestation,
    Tolerances,
    tolerances_of,
)
from torchtitan.grpo.attestation.probes import Probes, attested_tokens, is_attested

__all__ = [
    "Attestation",
    "AttestationFailed",
    "Probes",
    "ServerAttestation",
    "Tolerances",
    "attested_tokens",
    "is_attested",
    "tolerances_of",
]
