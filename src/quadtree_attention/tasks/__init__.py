# SPDX-License-Identifier: Apache-2.0
"""What can be trained, evaluated and used: one folder per task, and the engine they share."""
