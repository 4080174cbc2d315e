"""What several packages of tests share."""

import pytest

import hpcdist as dist


@pytest.fixture(autouse=True)
def leaves_no_world():
    """Fail a test that leaves its world begun: later ones would find it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test leaves a world begun; see dist.destroy_process_group")


@pytest.fixture(scope="module")
def object_store():
    """An S3 server of this process; the variables that s3fs and boto3 look at."""
    server_of = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_of.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    environ = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield f"{host}:{port}"
    server.stop()
