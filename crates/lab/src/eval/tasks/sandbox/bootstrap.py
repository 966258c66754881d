"""Runs the program on standard input under limits. Arguments: CPU seconds, bytes of memory, bytes of a file.

Ends with status 77 if and only if the program ran to its end.
"""
import os
import resource
import sys
import traceback

cpu_seconds, memory_bytes, file_bytes = (int(word) for word in sys.argv[1:4])
source = sys.stdin.buffer.read()
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
home = os.path.realpath(os.getcwd())


def limit(name, value, grace=0):
    kind = getattr(resource, name, None)
    if kind is not None:
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            value, grace = min(value, most), min(grace, max(most - value, 0))
        resource.setrlimit(kind, (value, value + grace))


# The signal at the soft limit says what happened; the one at the hard limit cannot be caught.
limit("RLIMIT_CPU", cpu_seconds, grace=1)
limit("RLIMIT_AS", memory_bytes)
limit("RLIMIT_FSIZE", file_bytes)
limit("RLIMIT_NOFILE", 64)
limit("RLIMIT_NPROC", 0)
limit("RLIMIT_CORE", 0)

# Not a wall against native code; it keeps a program from reaching beyond its folder by accident.
refused = (
    "socket.", "subprocess.", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
    "os.startfile", "os.kill", "os.killpg", "pty.", "ftplib.", "http.", "imaplib.", "poplib.", "smtplib.", "telnetlib.",
    "urllib.", "webbrowser.", "syslog.", "resource.setrlimit", "resource.prlimit", "sys.addaudithook", "gc.",
)
changes = {
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.removexattr", "os.chflags", "shutil.rmtree", "shutil.move", "shutil.copyfile",
    "shutil.chown", "shutil.make_archive", "shutil.unpack_archive",
}
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
realpath, fsdecode, separator = os.path.realpath, os.fsdecode, os.sep


def outside(path):
    if isinstance(path, int):
        return False
    try:
        path = realpath(fsdecode(path))
    except (TypeError, ValueError):
        return True
    return path != home and not path.startswith(home + separator)


def guard(event, arguments):
    if event.startswith(refused):
        raise PermissionError(event + " is not allowed")
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & writing and path != os.devnull and outside(path):
            raise PermissionError("writing outside of the folder is not allowed")
    elif event in changes:
        if any(isinstance(argument, (str, bytes)) and outside(argument) for argument in arguments):
            raise PermissionError(event + " outside of the folder is not allowed")
    elif event == "ctypes.dlopen" and arguments and arguments[0] is not None:
        raise PermissionError("native libraries are not allowed")


sys.argv = ["program"]
sys.addaudithook(guard)
status = 1
try:
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    status = 77
except SystemExit as stopped:
    sys.stderr.write("the program ended itself before its test did (%r)\n" % (stopped.code,))
except BaseException:
    traceback.print_exc(limit=-3)
finally:
    try:
        sys.stderr.flush()
    finally:
        os._exit(status)
