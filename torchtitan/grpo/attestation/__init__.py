# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks by log-probabilities that a server serves the weights that were pushed to it.

The server must rate fixed tokens as the trainer does.

This is stronger evidence than the version that the server reports, because the compared
numbers are computed from the weights. Dropout is off and no token is sampled, so both sides
compute the same numbers except for what their kernels round differently; see
`bound.py`.
"""

from torchtitan.grpo.attestation.bound import Tolerances, tolerances_of
from torchtitan.grpo.attestation.comparison import AttestationFailed
from torchtitan.grpo.attestation.probes import Probes, attested_tokens, is_attested
from torchtitan.grpo.attestation.server_attestation import Attestation, ServerAttestation

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
