"""The same verbs on every file system: local, in memory, WebHDFS and an object store, all real."""

import os
import socket
import uuid

import pytest
from webhdfs import Handler, webhdfs

import hpcdist as dist
from hpcdist import fs as file_systems
from hpcdist.fs import HDFSClient, LocalFS, RemoteFS, file_system

pytest.importorskip("fsspec")


def hdfs(server, **options):
    return HDFSClient("", {"fs.default.name": f"webhdfs://127.0.0.1:{server.port}"}, **options)


@pytest.fixture(params=["local", "memory", "webhdfs", "s3"])
def there(request, tmp_path):
    """A file system and a folder in it that is this test's."""
    if request.param == "local":
        yield LocalFS(), str(tmp_path)
    elif request.param == "memory":
        yield RemoteFS("memory"), f"/{uuid.uuid4()}"
    elif request.param == "webhdfs":
        (tmp_path / "root").mkdir()
        with webhdfs(tmp_path / "root") as server:
            yield hdfs(server), "/data"
    else:
        request.getfixturevalue("object_store")
        fs = RemoteFS("s3", skip_instance_cache=True)
        bucket = f"bucket-{uuid.uuid4()}"
        fs.mkdirs(bucket)
        yield fs, f"{bucket}/data"


def put(fs, path, content=b"content"):
    with fs.open(path, "wb") as file:
        file.write(content)


def got(fs, path):
    with fs.open(path, "rb") as file:
        return file.read()


@pytest.fixture
def tree(there):
    """A folder with two files, one of them in a folder of its own."""
    fs, root = there
    fs.mkdirs(f"{root}/below")
    put(fs, f"{root}/a file", b"a")
    put(fs, f"{root}/below/b", b"bb")
    return fs, root


def test_two_readers_of_a_file_do_not_disturb_each_other(there):
    fs, root = there
    fs.mkdirs(root)
    put(fs, f"{root}/a", b"0123456789")
    with fs.open(f"{root}/a", "rb") as one, fs.open(f"{root}/a", "rb") as two:
        assert (one.read(5), two.read(3), one.read(5)) == (b"01234", b"012", b"56789")


def test_what_is_written_is_found_and_read(tree):
    fs, root = tree
    assert fs.ls_dir(root) == (["below"], ["a file"])
    assert fs.list_dirs(root) == ["below"]
    assert got(fs, f"{root}/below/b") == b"bb"
    assert fs.cat(f"{root}/a file") == "a"
    assert fs.is_file(f"{root}/a file")
    assert fs.is_dir(f"{root}/below")
    assert not fs.is_dir(f"{root}/a file")
    assert not fs.is_file(f"{root}/below")
    assert fs.list_files_info([f"{root}/below/b"]) == [{"path": f"{root}/below/b", "size": 2}]


def test_what_is_not_there_is_nothing_or_an_error(there):
    fs, root = there
    assert fs.ls_dir(f"{root}/missing") == ([], [])
    assert not fs.is_exist(f"{root}/missing")
    assert fs.cat(f"{root}/missing") == ""
    fs.delete(f"{root}/missing")
    with pytest.raises(dist.errors.FSFileNotExistsError, match="missing"):
        fs.mv(f"{root}/missing", f"{root}/other")
    with pytest.raises(FileNotFoundError):
        fs.download(f"{root}/missing", "/nowhere")
    with pytest.raises(FileNotFoundError, match="missing"):
        fs.size(f"{root}/missing")


def test_a_file_moves_and_never_over_another_one_unasked(tree):
    fs, root = tree
    with pytest.raises(dist.errors.FSFileExistsError, match="overwrite=True"):
        fs.mv(f"{root}/a file", f"{root}/below/b")
    fs.mv(f"{root}/a file", f"{root}/below/b", overwrite=True)
    assert fs.ls_dir(root) == (["below"], [])
    assert got(fs, f"{root}/below/b") == b"a"


def test_a_file_moved_onto_itself_stays(tree):
    fs, root = tree
    fs.mv(f"{root}/a file", f"{root}/a file", overwrite=True)
    assert got(fs, f"{root}/a file") == b"a"


def test_a_folder_moves_whole_and_not_into_itself(tree):
    fs, root = tree
    with pytest.raises(dist.errors.FSFileExistsError, match="inside"):
        fs.mv(f"{root}/below", f"{root}/below/deeper", overwrite=True)
    with pytest.raises(dist.errors.FSFileExistsError, match="inside"):
        fs.mv(f"{root}/below/b", f"{root}/below", overwrite=True)
    fs.mv(f"{root}/below", f"{root}/moved")
    assert got(fs, f"{root}/moved/b") == b"bb"
    assert not fs.is_exist(f"{root}/below/b")


def test_a_folder_is_deleted_with_what_is_in_it(tree):
    fs, root = tree
    fs.delete(f"{root}/below")
    assert not fs.is_exist(f"{root}/below/b")
    assert fs.ls_dir(root)[1] == ["a file"]


def test_touch_keeps_what_is_there(tree):
    fs, root = tree
    fs.touch(f"{root}/a file")
    fs.touch(f"{root}/new")
    assert got(fs, f"{root}/a file") == b"a"
    assert got(fs, f"{root}/new") == b""
    with pytest.raises(dist.errors.FSFileExistsError, match="exist_ok"):
        fs.touch(f"{root}/a file", exist_ok=False)


def test_a_file_is_not_made_a_folder(tree):
    fs, root = tree
    with pytest.raises(dist.errors.FSFileExistsError, match="is a file"):
        fs.mkdirs(f"{root}/a file")


def test_folders_go_up_and_down_whole(there, tmp_path):
    fs, root = there
    local = tmp_path / "local"
    (local / "deep").mkdir(parents=True)
    contents = {"one": b"1", "deep/two": os.urandom(300_000), "deep/empty": b""}
    for name, content in contents.items():
        (local / name).write_bytes(content)
    fs.mkdirs(root)
    fs.upload_dir(str(local), f"{root}/up")
    assert {name: got(fs, f"{root}/up/{name}") for name in contents} == contents
    fs.download(f"{root}/up", str(tmp_path / "down"))
    assert {name: (tmp_path / "down" / name).read_bytes() for name in contents} == contents
    assert sorted(os.listdir(tmp_path / "down/deep")) == ["empty", "two"]


def test_nothing_is_replaced_unasked(tree, tmp_path):
    fs, root = tree
    local = tmp_path / "mine"
    local.write_bytes(b"mine")
    with pytest.raises(dist.errors.FSFileExistsError):
        fs.upload(str(local), f"{root}/a file")
    with pytest.raises(dist.errors.FSFileExistsError):
        fs.download(f"{root}/a file", str(local))
    fs.download(f"{root}/a file", str(local), overwrite=True)
    assert local.read_bytes() == b"a"
    local.write_bytes(b"newer")
    fs.upload(str(local), f"{root}/a file", overwrite=True)
    assert got(fs, f"{root}/a file") == b"newer"
    with pytest.raises(dist.errors.FSFileNotExistsError):
        fs.upload(str(tmp_path / "missing"), f"{root}/x")


@pytest.mark.parametrize("at_once", [0, True, "many"])
def test_a_number_of_transfers_is_a_number(there, tmp_path, at_once):
    fs, root = there
    if fs.need_upload_download():
        with pytest.raises(dist.UsageError, match="multi_processes"):
            fs.upload(str(tmp_path), f"{root}/x", at_once)


# ---- WebHDFS


def test_a_connection_that_fails_is_tried_again(tmp_path):
    with webhdfs(tmp_path) as server:
        fs = hdfs(server, sleep_inter=1)
        server.refuses = 2
        fs.mkdirs("/data")
        assert (tmp_path / "data").is_dir()


def test_a_server_that_is_down_is_a_time_out_that_names_what_was_asked():
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"webhdfs://127.0.0.1:{unheard.getsockname()[1]}"
        fs = HDFSClient("", {"fs.default.name": url}, time_out=200, sleep_inter=20)
        with pytest.raises(dist.errors.FSTimeOut, match=r"(?s)/data within 0\.2 s.*webhdfs"):
            fs.ls_dir("/data")


def test_a_server_that_never_answers_is_a_time_out():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"webhdfs://127.0.0.1:{silent.getsockname()[1]}"
        fs = HDFSClient("", {"fs.default.name": url}, time_out=300, sleep_inter=20)
        with pytest.raises(dist.errors.FSTimeOut, match="/data"):
            fs.is_exist("/data")


def test_the_user_is_told_and_the_address_of_webhdfs_may_be_another(tmp_path):
    with webhdfs(tmp_path) as server:
        configs = {
            "fs.default.name": "hdfs://name-node:9000",
            "hadoop.job.ugi": "ada,",
            "dfs.namenode.http-address": f"127.0.0.1:{server.port}",
        }
        HDFSClient("/opt/no-hadoop-here", configs).mkdirs("/data")
        assert ("MKDIRS", "/data", "ada") in server.seen


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with webhdfs(tmp_path / "root") as server:
        fs = hdfs(server, time_out=1000, sleep_inter=1)
        (tmp_path / "root/data").write_bytes(b"a file where a folder should be")
        with pytest.raises(dist.errors.ExecuteError):
            fs.upload(str(tmp_path / "file"), "/data/file")
        assert os.listdir(tmp_path / "root") == ["data"]


def test_a_rename_that_a_server_declines_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with webhdfs(tmp_path / "root") as server:
        fs = hdfs(server, time_out=5000, sleep_inter=1)
        fs.touch("/one")
        with pytest.raises(dist.errors.FSShellCmdAborted, match="has not renamed /one"):
            fs.mv("/one", "/no/folder/one")
        monkeypatch.setattr(Handler, "RENAME", lambda self: self.reply({"boolean": False}))
        with pytest.raises(dist.errors.FSShellCmdAborted, match="has not renamed"):
            fs.upload(str(tmp_path / "file"), "/two")
        assert os.listdir(tmp_path / "root") == ["one"]


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({}, "fs.default.name"),
        ({"fs.default.name": "host:9000"}, "hdfs://host"),
        ({"fs.default.name": "webhdfs://h", "hadoop.ugi": "x"}, "'hadoop.ugi'"),
        ({"fs.default.name": "nosuch://h"}, "nosuch"),
        (None, "must be a dict"),
    ],
)
def test_settings_that_mean_nothing_are_refused(configs, words):
    with pytest.raises(dist.UsageError, match=words):
        HDFSClient("", configs)


@pytest.mark.parametrize("wrong", [-1, "soon", float("nan"), True])
def test_limits_are_milliseconds(wrong):
    with pytest.raises(dist.UsageError, match="milliseconds"):
        HDFSClient("", {"fs.default.name": "webhdfs://h"}, time_out=wrong)


# ---- URLs


def test_a_url_names_its_file_system(tmp_path, object_store):
    with webhdfs(tmp_path) as server:
        url = f"webhdfs://127.0.0.1:{server.port}/deep/file"
        with file_systems.open(url, "wb") as file:
            file.write(b"by its URL")
        fs, inside = file_system(url)
        assert (fs.cat(inside), inside) == ("by its URL", "/deep/file")
    assert isinstance(file_system("s3://bucket/x")[0], RemoteFS)
    assert file_system("s3://bucket/x")[1] == "s3://bucket/x"


@pytest.mark.parametrize("path", ["/data/x", "data:x", "file:///data/x", "C://x", "x"])
def test_other_paths_are_of_this_machine(path):
    fs, inside = file_system(path)
    assert isinstance(fs, LocalFS)
    assert inside == path.removeprefix("file://")


def test_a_url_without_a_host_is_refused():
    with pytest.raises(dist.UsageError, match="names no host"):
        file_system("webhdfs:///data")


def test_names_with_spaces_and_new_lines_are_names(tmp_path):
    fs = LocalFS()
    for name in ("a b", "a\nb", "ä", "-rf"):
        fs.touch(str(tmp_path / name))
    assert set(fs.ls_dir(str(tmp_path))[1]) == {"a b", "a\nb", "ä", "-rf"}


# ---- file systems of a host, which rename


@pytest.fixture
def hosts(monkeypatch):
    """Let files of this machine be those of an SFTP server; return the hosts that were asked."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.utils import infer_storage_options

    asked = []

    class OfHost(LocalFileSystem):
        protocol = "sftp", "ssh"
        cachable = False

        def __init__(self, host, **options):
            super().__init__()
            asked.append((host, options))

        @classmethod
        def _strip_protocol(cls, path):
            return infer_storage_options(path)["path"]

        @staticmethod
        def _get_kwargs_from_urls(url):
            parts = infer_storage_options(url)
            return {key: parts[key] for key in parts.keys() - {"path", "protocol"}}

        def put_file(self, source, target, **options):
            assert target.endswith(".part")  # a file is not there before it is whole
            super().put_file(source, target, **options)

    plain = fsspec.get_filesystem_class
    classes = {"sftp": OfHost}
    monkeypatch.setattr(
        fsspec, "get_filesystem_class", lambda name: classes.get(name) or plain(name)
    )
    monkeypatch.setattr(
        fsspec, "filesystem", lambda name, **options: fsspec.get_filesystem_class(name)(**options)
    )
    return asked


def test_a_url_tells_host_port_and_user(hosts, tmp_path):
    fs, inside = file_system(f"sftp://me@host:2222{tmp_path}/data/a file")
    assert hosts == [("host", {"port": 2222, "username": "me"})]
    assert inside == f"{tmp_path}/data/a file"
    (tmp_path / "own").write_text("content")
    fs.upload(str(tmp_path / "own"), inside)
    assert fs.replaces_by_rename()
    fs.mv(f"{tmp_path}/data", f"{tmp_path}/moved")
    assert fs.cat(f"{tmp_path}/moved/a file") == "content"


def test_a_checkpoint_is_saved_on_a_host_and_loaded_from_it(hosts, tmp_path):
    import numpy as np

    url = f"sftp://host{tmp_path}/saved"
    for value in (1.0, 2.0):
        dist.checkpoint.save({"x": np.full(3, value)}, url)
    state = {"x": np.zeros(3)}
    dist.checkpoint.load(state, url)
    assert state["x"].tolist() == [2.0] * 3
    assert not [each for each in os.listdir(tmp_path / "saved") if each.endswith((".part", ".new"))]


def test_a_password_in_a_url_is_refused_and_not_shown(hosts):
    with pytest.raises(dist.UsageError, match="FSSPEC_SFTP_PASSWORD") as caught:
        file_system("sftp://me:secret@host/data")
    assert "secret" not in str(caught.value)
    assert not hosts


def test_a_host_that_is_not_there_is_named_without_its_password(hosts, monkeypatch):
    import fsspec

    def refuses(protocol, **options):
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(fsspec, "filesystem", refuses)
    with pytest.raises(dist.errors.FSTimeOut, match=r"'sftp' of there: .*refused") as caught:
        RemoteFS("sftp", host="there", password="secret")
    assert "secret" not in str(caught.value)


def test_what_a_file_system_cannot_do_is_not_tried_again(monkeypatch):
    fs, tries = RemoteFS("memory"), []

    def cannot(path, mode):
        tries.append(path)
        raise NotImplementedError("drill")

    monkeypatch.setattr(fs._fs, "open", cannot, raising=False)
    with pytest.raises(dist.errors.FSShellCmdAborted, match=r"could not open /x: .*drill"):
        fs.open("/x")
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: file_system("ftp://host/data"), "'ftp' cannot be used: it has one connection"),
        (lambda: RemoteFS("ftp", host="localhost"), "use sftp"),
        (lambda: RemoteFS("sftp"), "'sftp' cannot be used: .*host"),
        (lambda: file_system("nothing://host/data"), "Protocol not known"),
    ],
)
def test_a_file_system_that_cannot_be_used_is_refused_in_a_sentence(hosts, make, words):
    with pytest.raises(dist.UsageError, match=words):
        make()


def test_a_local_file_is_moved_by_paddles_keywords(tmp_path):
    (tmp_path / "one").write_text("1")
    LocalFS().mv(src_path=f"{tmp_path}/one", dst_path=f"{tmp_path}/two", test_exists=False)
    assert (tmp_path / "two").read_text() == "1"
