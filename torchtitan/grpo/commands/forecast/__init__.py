# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Simulates a run before it starts: its speed, its idle times, and what would make it faster.

system.py      what is simulated: settings, numbers of devices, costs, lengths; scaling it down
servers.py     a simulated server, which decodes all running completions together
simulation.py  the events of a run, under the run's own rules of admission and dispatch
lend_forecast.py  the same with servers on the devices of training, under the run's own scheduler
hardware.py    costs by calculation, for a kind of GPU
measured.py    costs measured in an earlier run
search.py      the best division of devices between training and servers
changes.py     changes of settings that could make the run faster, and what each would gain
command.py     ``torchtitan-grpo plan``
"""
