"""Objectives, as pure functions; one part a file.

| file                                                     | runs in       | put together by |
|----------------------------------------------------------|---------------|-----------------|
| advantage_estimators, normalization, aggregation         | rollout queue | minibatch       |
| shaping, policy_loss, importance_ratio, kl, soft_value   | trainer ranks | objective       |

`objective.py` adds the entropy bonus. May import only config, and torch for types alone, as the
launcher looks names up without it.
"""
