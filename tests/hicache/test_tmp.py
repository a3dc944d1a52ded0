import pytest
@pytest.mark.parametrize("model", ["full+swa", "full+mamba"])
def test_x(make_rig, t, model):
    needed = {"full": 4, "swa": 4, "wide": 6, "mamba": 2}
    host = {name: needed[name] for name in model.split("+")}
    rig = make_rig(model, host=host, store="scripted", policy__write="write_back")
    rig.serve(t(60))
    rig.serve(t(160, 101))
    for i in range(3):
        print(rig.cache.flush(), rig.cache.stats().faults, rig.cache.stats().tree)
    for v in rig._views(): print(v.start, len(v.tokens), {k[0]+str(int(k[1])):len(s) for k,s in v.slots.items()}, v.mark)
