#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv-clients, with the programs that call their model themselves and with which agents are tested: LiteLLM,
# OpenAI's Agents SDK, LangChain's client, and LangGraph. usage: bash scripts/install_clients.sh

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

parse_device --cpu
open_environment "$REPOSITORY/.venv-clients" "${BASH_SOURCE[0]}" "$REPOSITORY/requirements/clients.txt"
locked clients.txt
close_environment
