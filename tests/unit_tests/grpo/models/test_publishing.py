"""The publisher under pipeline parallelism, beside a training thread that does not wait."""


def test_versions_published_from_pipeline_stages_arrive_whole(make_model, run_ranks):
    _, folder = make_model("qwen3")
    layout = {"pp": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble"}
    leader, *followers = run_ranks("publish_while_training", 4, model=folder, layout=layout)
    assert leader["pushed"][-1] == 5
    assert leader["unequal"] == leader["unexpected"] == []
    assert all(follower["pushed"] == [] for follower in followers)
