"""Profile: what a step costs, measured on real caches, for who plans capacity. Called by `jhybrid profile`.

```python
with Engine(config, max_parked=1) as engine:
    profile = run_profile(engine, ProfileConfig(batches=(1, 8)), Path("profile"))
LatencyModel.load(Path("profile")).itl(batch=8, depth=1024)
```
"""
