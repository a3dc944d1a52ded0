import pytest
@pytest.mark.parametrize("host", [64, 32, 16])
def test_head(make_rig, t, disk, host):
    from hicache.types import Tier
    stores = [{"kind": "disk", "path": str(disk), "capacity": "4MiB"}]
    first = make_rig("full", device=136, host=host, tiers__stores=stores, policy__write="write_back")
    first.serve(t(512))
    for turn in range(24):
        first.serve([*t(16), *t(104 + 100 * (turn + 6), 100 * (turn + 6))])
        first.serve(t(10_000 + 1000 * turn + 32, 10_001 + 1000 * turn))
    print( first.cache.probe([*t(512),1]), first.cache.stats().faults, first.resident("full",Tier.HOST), first.free())
    print(first.cache.flush(), first.cache.stats().faults)
    print(first.cache.stats().tree)
    print("".join("01"[x] for x in first.stored(t(512))))
