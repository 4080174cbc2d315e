"""`fleet.init` and what it returns, on simulated ranks."""

import logging
import sys
import types

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import fleet
from hpcdist.comm.session import Whereabouts, require_session
from hpcdist.fleet import functions, servers
from hpcdist.fleet.job import _MODELS, _OPTIMIZERS, _SCALERS, init
from hpcdist.parallel.hybrid import current_grid
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.rpc.names import Directory, WorkerInfo


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("TRAINING_ROLE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"):
        monkeypatch.delenv(name, raising=False)


def strategy_of(**degrees):
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    return strategy


# ---- init


def test_degrees_come_from_keywords_or_the_strategy():
    def check():
        made = fleet.init(is_collective=True, strategy=strategy_of(mp=2, pp=2))
        assert made.get_hybrid_communicate_group().degrees == {
            "dp": 2, "pp": 2, "sharding": 1, "sep": 1, "cp": 1, "mp": 2
        }  # fmt: skip
        assert fleet.get_hybrid_communicate_group() is current_grid()
        dist.destroy_process_group()
        assert fleet.init(mp=2, pp=2).grid.degrees == made.grid.degrees
        dist.destroy_process_group()
        assert fleet.init(strategy=strategy_of(mp=4), dp=2).grid.degree("dp") == 2
        dist.destroy_process_group()
        assert fleet.init().grid.degrees["dp"] == 8
        assert fleet.get_hybrid_parallel_topology().world_size() == 8

    dist.simulate(8, check)


def test_a_world_of_one_has_every_axis():
    def check():
        strategy = strategy_of(sharding=-1)
        strategy.gradient_merge = True
        made = fleet.init(is_collective=True, strategy=strategy)
        assert made.worker_num() == 1
        assert [made.grid[axis].nranks for axis in ("dp", "mp", "pp", "sep")] == [1] * 4
        assert made.options.gradient_merge is not None
        assert repr(made) == "Fleet(dp=1 x pp=1 x sharding=1 x sep=1 x cp=1 x mp=1)"

    dist.simulate(1, check)


def test_sharding_without_a_degree_takes_all_ranks():
    def check():
        strategy = fleet.DistributedStrategy()
        strategy.sharding = True
        strategy.sharding_configs = {"stage": 2}
        made = fleet.init(strategy=strategy)
        assert (made.grid.degree("sharding"), made.grid.degree("dp")) == (4, 1)
        assert made.options.sharding.stage == 2
        dist.destroy_process_group()
        made = fleet.init(strategy=strategy, dp=2, sharding=2)
        assert (made.grid.degree("sharding"), made.grid.degree("dp")) == (2, 2)

    dist.simulate(4, check)


def test_an_order_moves_the_axes():
    def check():
        strategy = strategy_of(mp=2)
        strategy.hybrid_configs["order"] = ["mp", "dp", "pp", "sharding"]
        return fleet.init(strategy=strategy).grid["mp"].ranks

    assert dist.simulate(4, check) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_ranks_that_are_dealt_out_to_nodes_in_turn_are_gathered_by_node():
    def check():
        dist.init_parallel_env()
        nodes = tuple(f"n{rank % 2}:{rank}" for rank in range(8))
        require_session().whereabouts = Whereabouts(0, 4, 0, 2, nodes)
        made = fleet.init(mp=4)
        assert made.node_num() == 2
        assert made.grid["mp"].rank == made.grid.rank("mp")
        return made.grid["mp"].ranks

    assert dist.simulate(8, check) == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4


def test_a_part_of_the_ranks_trains():
    def check():
        rank = dist.init_parallel_env().rank
        part = dist.new_group([0, 2, 3])
        if rank == 1:
            with pytest.raises(dist.UsageError, match="only members of a group call"):
                fleet.init(group=part)
            return None
        fleet.init(group=part)
        assert fleet.util.all_reduce(1) == 3
        return fleet.worker_index(), fleet.worker_num()

    assert dist.simulate(4, check) == [(0, 3), None, (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: {"mp": 3}, "mp=3 takes 3 ranks, so dp=-1 is 4 / 3, .*dp=2 x mp=2 would fit"),
        (lambda: {"dp": 2, "mp": 4}, "take 8 ranks, but there are 4 ranks"),
        (lambda: {"strategy": strategy_of(mp=2), "mp": 4}, r"mp=4, but .*\['mp_degree'\] is 2"),
        (lambda: {"strategy": {"mp": 2}}, "must be a fleet.DistributedStrategy"),
        (lambda: {"is_collective": 1}, "`is_collective` should be instance of `bool`"),
        (lambda: {"is_collective": strategy_of()}, "`is_collective` should be instance of `bool`"),
        (lambda: {"role_maker": "cloud"}, "`role_maker` should be subclass of `RoleMakerBase`"),
        (lambda: {"log_level": "LOUD"}, "a log level is one of DEBUG"),
        (
            lambda: {"role_maker": fleet.UserDefinedRoleMaker(current_id=0, worker_num=7)},
            "the role maker says worker 0 of 7, but this is rank . of 4",
        ),
        (
            lambda: {
                "role_maker": fleet.UserDefinedRoleMaker(worker_num=4, server_endpoints=["n:1"]),
                "is_collective": True,
            },
            "without parameter servers",
        ),
    ],
)
@pytest.mark.parametrize("wrong", [[0, 1, 2, 3], [2]])
def test_a_wrong_argument_is_an_error_on_every_rank(given, told, wrong):
    def check():
        rank = dist.init_parallel_env().rank
        with pytest.raises(dist.HpcdistError, match=told) as caught:
            fleet.init(**(given() if rank in wrong else {}))
        assert isinstance(caught.value, dist.UsageError if rank in wrong else dist.RemoteError)
        assert current_grid() is None
        assert fleet.init().worker_num() == 4  # and the group is as usable as before

    dist.simulate(4, check)


@pytest.mark.parametrize("order", [["dp", "mp", "mp", "pp", "sharding"], ["dp", "pp", "sharding"]])
def test_an_order_with_a_name_twice_or_missing_is_an_error_on_every_rank(order):
    def check():
        strategy = strategy_of(mp=2)
        strategy.hybrid_configs["order"] = order
        with pytest.raises(dist.UsageError, match=r"twice|lacks"):
            fleet.init(strategy=strategy)

    dist.simulate(2, check)


def test_ranks_that_want_different_things_all_hear_of_it():
    def check():
        rank = dist.init_parallel_env().rank
        with pytest.raises(dist.MismatchError, match="rank 1 has 'with ranks that only serve'"):
            fleet.init(server_num=rank % 2)
        with pytest.raises(dist.MismatchError, match="rank 0 has 'dp=4', but rank 1 has 'dp=2'"):
            fleet.init(mp=1 + rank % 2)
        strategy = fleet.DistributedStrategy()
        strategy.lars = rank == 3
        with pytest.raises(
            dist.MismatchError, match=r"different settings; .* rank 3 has 'lars=Lars"
        ):
            fleet.init(strategy=strategy)

    dist.simulate(4, check)


def test_a_second_init_with_the_same_arguments_is_the_same():
    def check():
        first = fleet.init(mp=2)
        assert fleet.init(mp=2) is first
        assert fleet.init(strategy=strategy_of(dp=2, mp=2)) is first

    dist.simulate(4, check)


@pytest.mark.parametrize("other", [{}, {"mp": 4}, {"mp": 2, "pp": 2}])
def test_a_second_init_with_others_is_refused_until_the_end_of_the_first(other):
    def check():
        fleet.init(mp=2)
        with pytest.raises(
            dist.UsageError, match=r"called before, for dp=2 .*destroy_process_group"
        ):
            fleet.init(**other)
        strategy = strategy_of(mp=2)
        strategy.lamb = True
        with pytest.raises(dist.UsageError, match=r"with lamb=Lamb\(.* in place of lamb=None;"):
            fleet.init(strategy=strategy)
        dist.destroy_process_group()
        assert fleet.init(**other).grid.degree("mp") == other.get("mp", 1)

    dist.simulate(4, check)


def test_servers_are_refused_where_the_job_is_collective_or_nobody_knows_them(monkeypatch):
    monkeypatch.setenv("TRAINING_ROLE", "PSERVER")

    def check():
        with pytest.raises(dist.UsageError, match="fleet trains collectively"):
            fleet.init(is_collective=True)
        with pytest.raises(dist.UsageError, match="refuses ranks that only serve"):
            fleet.init(is_collective=True, server_num=1)
        with pytest.raises(dist.UsageError, match="PADDLE_TRAINERS_NUM is not set"):
            fleet.init()

    dist.simulate(2, check)


# ---- before init, and what is for servers

BEFORE = [name for name, value in vars(functions).items() if hasattr(value, "__signature__")]


@pytest.mark.parametrize("name", BEFORE)
def test_nothing_works_before_init_and_says_so(name):
    required = [
        each.name
        for each in getattr(fleet, name).__signature__.parameters.values()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]

    def check():
        with pytest.raises(dist.UsageError, match=rf"fleet\.{name} was called before fleet\.init"):
            getattr(fleet, name)(*required)
        dist.init_parallel_env()
        with pytest.raises(dist.UsageError, match=r"call hpcdist\.fleet\.init\(\) first"):
            getattr(fleet, name)(*required)

    dist.simulate(1, check)


def test_the_utilities_say_so_too():
    with pytest.raises(dist.UsageError, match=r"call hpcdist\.fleet\.init\(\) first"):
        dist.simulate(1, lambda: (dist.destroy_process_group(), fleet.util.barrier()))


SERVERS = {
    name: value
    for name, value in vars(servers).items()
    if getattr(value, "__module__", "") == servers.__name__ and not name.startswith("_")
}


@pytest.mark.parametrize("name", SERVERS)
def test_names_for_tables_wait_for_init_too(name):
    import inspect

    required = [
        each.name
        for each in inspect.signature(SERVERS[name]).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    told = rf"fleet\.{name} was called before fleet\.init"
    with pytest.raises(dist.UsageError, match=told):
        dist.simulate(1, getattr(fleet, name), *required)


# ---- ranks


def test_workers_know_who_they_are():
    def check():
        world = dist.init_parallel_env()
        made = fleet.init()
        assert (made.worker_index(), fleet.worker_num()) == (world.rank, world.nranks)
        assert fleet.is_first_worker() == (world.rank == 0)
        assert (fleet.is_worker(), fleet.is_server(), fleet.is_coordinator()) == (
            True,
            False,
            False,
        )
        assert (fleet.server_num(), fleet.server_endpoints(), fleet.server_endpoints(True)) == (
            0,
            [],
            "",
        )
        assert fleet.worker_endpoints() == [f"localhost:{rank}" for rank in range(3)]
        assert fleet.worker_endpoints(to_string=True) == ",".join(fleet.worker_endpoints())
        assert (fleet.node_num(), fleet.local_rank()) == (1, world.rank)
        assert (fleet.local_device_ids(), fleet.world_device_ids()) == ([], [[], [], []])
        fleet.barrier_worker()

    dist.simulate(3, check)


def test_endpoints_that_the_role_maker_tells_are_told():
    def check():
        rank = dist.init_parallel_env().rank
        maker = fleet.UserDefinedRoleMaker(current_id=rank, worker_endpoints=["a:1", "b:2"])
        fleet.init(maker)
        return fleet.worker_endpoints(True)

    assert dist.simulate(2, check) == ["a:1,b:2"] * 2


def test_the_level_of_the_logger_is_set():
    def check():
        made = fleet.init(log_level="WARNING")
        assert logging.getLogger("hpcdist.fleet").level == logging.WARNING
        fleet.set_log_level("debug")
        assert logging.getLogger("hpcdist.fleet").level == logging.DEBUG
        fleet.set_log_level(20)
        assert logging.getLogger("hpcdist.fleet").level == logging.INFO
        with pytest.raises(dist.UsageError, match="a log level"):
            made.set_log_level(True)

    dist.simulate(1, check)


def test_memory_is_printed(capsys):
    def check():
        fleet.init()
        fleet.check_memory_usage("after init")

    dist.simulate(1, check)
    assert "rank 0, after init: " in capsys.readouterr().out


# ---- models and optimizers: found by their type


class Model:
    def named_parameters(self):
        return iter([("w", dist.Parameter(np.ones(2)))])


class Engine:
    """What engines do, as far as `Fleet` knows: they note what they get."""

    @staticmethod
    def model(model, grid, options):
        return "model", model, grid, options

    @staticmethod
    def optimizer(optimizer, grid, options):
        return types.SimpleNamespace(
            options=options, step=optimizer.step, param_groups=optimizer.param_groups
        )

    @staticmethod
    def scaler(scaler, grid):
        return scaler


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setitem(sys.modules, "engine_of_this_test", Engine)
    for table, name in ((_MODELS, "model"), (_OPTIMIZERS, "optimizer"), (_SCALERS, "scaler")):
        for row in [*table]:
            monkeypatch.setitem(table, row, f"engine_of_this_test:{name}")


def test_models_go_to_the_engine_of_their_type(engine):
    def check():
        made, model = fleet.init(), Model()
        assert fleet.distributed_model(model) == ("model", model, made.grid, HybridOptions())
        with pytest.raises(dist.UsageError, match="model should not be None"):
            fleet.distributed_model(None)
        with pytest.raises(dist.UsageError, match="distributed_model got 3"):
            fleet.distributed_model(3)

    dist.simulate(2, check)


def test_optimizers_go_to_the_engine_of_their_type_with_a_strategy_of_their_own(engine):
    def check():
        made = fleet.init()
        own = dist.optim.SGD([dist.Parameter(np.ones(2))], 0.5)
        assert fleet.distributed_optimizer(own).options == made.options
        strategy = fleet.DistributedStrategy()
        strategy.gradient_merge = True
        found = fleet.distributed_optimizer(own, strategy)
        assert found.options.gradient_merge is not None
        with pytest.raises(
            dist.UsageError, match=r"an optimizer of torch or of hpcdist.optim can be"
        ):
            fleet.distributed_optimizer(object())
        with pytest.raises(
            dist.UsageError, match=r"the strategy wants dp=1 .*mp=2, but fleet.init"
        ):
            fleet.distributed_optimizer(own, strategy_of(mp=2))
        with pytest.raises(dist.UsageError, match=r"must be a fleet.DistributedStrategy"):
            fleet.distributed_optimizer(own, 3)

    dist.simulate(2, check)


def test_the_strategy_describes_a_scaler():
    pytest.importorskip("torch")

    def check():
        strategy = fleet.DistributedStrategy()
        strategy.amp = True
        strategy.amp_configs = {"init_loss_scaling": 64.0}
        fleet.init(strategy=strategy)
        scaler = fleet.distributed_scaler(None)
        assert scaler.get_scale() == fleet.get_loss_scaling() == 64.0

    def check_without():
        fleet.init()
        with pytest.raises(dist.UsageError, match=r"strategy\.amp is False"):
            fleet.distributed_scaler(None)

    dist.simulate(1, check)
    dist.simulate(1, check_without)


def test_the_factor_of_the_loss_is_the_scalers(engine):
    def check():
        fleet.init()
        with pytest.raises(dist.UsageError, match="there is no scaler"):
            fleet.get_loss_scaling()
        fleet.distributed_scaler(dist.GradScaler(init_loss_scaling=8.0))
        assert fleet.get_loss_scaling() == 8.0
        with pytest.raises(dist.UsageError, match="GradScaler can be distributed"):
            fleet.distributed_scaler(object())

    dist.simulate(1, check)


def test_minimize_is_a_backward_pass_and_a_step(engine):
    class Loss:
        def __init__(self, parameter):
            self.parameter = parameter

        def backward(self):
            self.parameter.grad = np.full(2, 2.0)

    def check():
        fleet.init()
        weights = dist.Parameter(np.ones(2))
        with pytest.raises(dist.UsageError, match="minimize needs an optimizer"):
            fleet.minimize(Loss(weights))
        fleet.distributed_optimizer(dist.optim.SGD([weights], 0.25))
        operators, changed = fleet.minimize(Loss(weights))
        assert operators == []
        assert [(parameter is weights, gradient.tolist()) for parameter, gradient in changed] == [
            (True, [2.0, 2.0])
        ]
        assert weights.data.tolist() == [0.5, 0.5]
        with pytest.raises(dist.UsageError, match="needs a loss that has backward"):
            fleet.minimize(3.0)
        for name in ("startup_program", "parameter_list", "no_grad_set"):
            with pytest.raises(dist.UsageError, match=f"{name} is for static programs"):
                fleet.minimize(Loss(weights), **{name: []})

    dist.simulate(1, check)


@pytest.mark.parametrize("name", ["amp_init", "qat_init"])
def test_what_is_for_programs_says_what_to_do(name):
    def check():
        fleet.init()
        with pytest.raises(dist.UsageError, match="and there is none; "):
            getattr(fleet, name)("cpu")

    dist.simulate(1, check)


# ---- saving


class Saved:
    def __init__(self, value):
        self.values = {"w": np.full(4, value)}

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


def test_a_model_is_saved_with_its_optimizer_or_alone(tmp_path):
    def check():
        fleet.init()
        fleet.save_persistables(None, f"{tmp_path}/all", Saved(3.0))
        fleet.save(f"{tmp_path}/too", main_program=Saved(4.0))
        fleet.save_inference_model(None, f"{tmp_path}/weights", [], [], Saved(5.0))
        with pytest.warns(UserWarning, match="feeded_var_names and target_vars have no effect"):
            fleet.save(f"{tmp_path}/fed", ["x"], ["y"], main_program=Saved(6.0))
        with pytest.raises(dist.UsageError, match="mode=1 is for tables of parameter servers"):
            fleet.save_persistables(None, f"{tmp_path}/all", Saved(3.0), mode=1)
        with pytest.raises(dist.UsageError, match="there is no model"):
            fleet.save_persistables(None, f"{tmp_path}/all")

    dist.simulate(1, check)
    for name, value in {"all": 3.0, "too": 4.0, "weights": 5.0, "fed": 6.0}.items():
        found = dist.load_merged_state_dict(f"{tmp_path}/{name}")
        assert [array.tolist() for array in found.values()] == [[value] * 4]


# ---- measuring


def test_a_collective_is_measured_and_slow_ones_are_told(capsys):
    def check():
        fleet.init()
        for name in ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"):
            getattr(fleet, f"{name}_perf")(round=2, size_and_time={1 << 12: 1e6})
        fleet.collective_perf("allreduce", 1, {8: 1e6, 64: 1e6})

    dist.simulate(2, check)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 7
    assert told[0].startswith("allreduce of 4 KiB on 2 ranks: ")


def test_what_takes_longer_than_its_limit_is_a_warning():
    def check():
        fleet.init()
        with pytest.warns(UserWarning, match="which is longer than"):
            fleet.collective_perf("broadcast", 1, {1 << 12: 1e-12})

    dist.simulate(1, check)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("all_reduce",), "no collective 'all_reduce'; did you mean 'allreduce'"),
        (("allreduce", 0), "round must be an integer of at least 1"),
        (("allreduce", 1, [1]), "must be a dictionary"),
        (("allreduce", 1, {0: 1.0}), "a size must be an integer of at least 1"),
        (("allreduce", 1, {8: 0}), "a limit is a positive number"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(given, told):
    def check():
        fleet.init()
        with pytest.raises(dist.HpcdistError, match=told):
            fleet.collective_perf(*(given if dist.get_rank() else ("allreduce", 1, {8: 1.0})))

    dist.simulate(2, check)


def test_init_is_what_fleet_has():
    assert fleet.init is init


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("distributed_model", Model),
        ("distributed_optimizer", lambda: dist.optim.SGD([dist.Parameter(np.ones(2))], 0.5)),
        ("distributed_scaler", dist.GradScaler),
    ],
)
def test_one_rank_with_something_else_is_an_error_on_all(name, good, engine):
    def check():
        made = fleet.init()
        with pytest.raises(dist.HpcdistError, match="rank 1"):
            getattr(made, name)(3 if made.worker_index() == 1 else good())
        getattr(made, name)(good())

    dist.simulate(3, check)


def test_an_optimizer_that_one_rank_cannot_step_is_an_error_on_all():
    def check():
        made = fleet.init(is_collective=True, sharding=3)
        strategy = fleet.DistributedStrategy()
        strategy.localsgd = made.worker_index() == 1  # of models of torch alone
        strategy.hybrid_configs = {"sharding_degree": 3}
        own = dist.optim.SGD([dist.Parameter(np.ones(2))], 0.5)
        with pytest.raises(dist.HpcdistError, match="localsgd"):
            fleet.distributed_optimizer(own, strategy)

    dist.simulate(3, check)


def test_ranks_that_have_other_optimizers_all_hear_of_it():
    def check():
        kind = dist.optim.Adam if fleet.init().worker_index() == 1 else dist.optim.SGD
        with pytest.raises(dist.MismatchError, match=r"(?s)SGD'.*Adam'.*of the same class"):
            fleet.distributed_optimizer(kind([dist.Parameter(np.ones(2))], 0.5))

    dist.simulate(3, check)


def test_a_group_that_is_none_is_an_error_on_every_rank():
    def check():
        rank = dist.init_parallel_env().rank
        with pytest.raises(dist.HpcdistError, match=r"group must be a Group, got \[0, 1\]"):
            fleet.init(group=[0, 1] if rank else None)

    dist.simulate(2, check)


PADDLES = {
    "field": (TypeError, lambda: setattr(fleet.DistributedStrategy(), "nothing", 1)),
    "key": (
        AssertionError,
        lambda: setattr(fleet.DistributedStrategy(), "amp_configs", {"nothing": 1}),
    ),
    "ranks": (TypeError, lambda: dist.new_group(3)),
    "model": (AssertionError, lambda: (fleet.init(), fleet.distributed_model(None))),
    "degrees": (AssertionError, lambda: fleet.init(dp=2, mp=7)),
    "group": (AssertionError, lambda: destroy_twice(dist.new_group([0, 1]))),
    "coordinates": (AssertionError, lambda: fleet.CommunicateTopology().get_rank(data=0)),
    "operation": (AssertionError, lambda: dist.split(np.ones((2, 4)), (4, 2), "conv")),
    "size": (AssertionError, lambda: dist.split(np.ones((2, 4)), (4,), "linear")),
    "axis": (AssertionError, lambda: dist.split(np.ones(2, int), (4, 2), "embedding", axis=1)),
    "names": (AssertionError, lambda: Directory([WorkerInfo("a", each, "", 0) for each in (0, 1)])),
}


def destroy_twice(group):
    dist.destroy_process_group(group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", PADDLES)
def test_errors_are_caught_as_those_of_paddle_and_as_usage_errors(name):
    kind, call = PADDLES[name]

    def caught():
        with pytest.raises(kind) as error:
            call()
        return isinstance(error.value, dist.UsageError) and type(error.value) is not kind

    assert dist.simulate(2, caught) == [True, True]
