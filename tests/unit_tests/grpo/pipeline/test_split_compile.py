import pytest
S=[[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
PLAIN = {"pp": 2, "schedule": "Interleaved1F1B","compiled":True}
ZBV = {"pp": 2, "schedule": "ZBVZeroBubble","compiled":True}
@pytest.mark.parametrize("mode", ["none","full","selective op"])
def test_x(make_model, run_ranks, mode):
    _, folder = make_model("qwen3", num_hidden_layers=4, intermediate_size=78)
    (r,*_)=run_ranks("deferred_gradients", 2, model=folder, seq_len=12, sequences=S, rows=[[0],[1],[2],[3]], cases=[{**PLAIN,"ac":mode},{**ZBV,"ac":mode}])
    print(r)
    assert r["results"][1]["different"]==[]
