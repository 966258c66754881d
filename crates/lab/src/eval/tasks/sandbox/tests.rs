use std::time::{Duration, Instant};

use super::{Limits, Network, Outcome, Sandbox};

fn quick() -> Limits {
    Limits { wall: Duration::from_secs(5), cpu_seconds: 2, memory_bytes: 256 << 20, ..Limits::default() }
}

/// The sandbox as it is here, and the one of a system without namespaces.
fn sandboxes() -> Vec<Sandbox> {
    let Ok(sandbox) = Sandbox::new(None, quick()) else {
        eprintln!("no Python here: nothing to test");
        return Vec::new();
    };
    let without = Sandbox { unshare: None, ..sandbox.clone() };
    if sandbox.network() == Network::Hook { vec![sandbox] } else { vec![sandbox, without] }
}

fn failure(outcome: Outcome) -> String {
    match outcome {
        Outcome::Failed(said) => said,
        other => panic!("{other:?}"),
    }
}

#[test]
fn programs_pass_only_by_running_to_their_end() {
    for sandbox in sandboxes() {
        let run = |program: &str| sandbox.run(program).expect("run");
        assert_eq!(run("import math, hashlib, re\nassert math.gcd(4, 6) == 2\n"), Outcome::Passed);
        assert!(failure(run("assert 1 == 2, 'wrong'")).contains("AssertionError: wrong"));
        assert!(failure(run("def f(:\n")).contains("SyntaxError"));
        assert!(failure(run("import sys\nsys.exit(0)\nassert False")).contains("ended itself"));
        assert!(failure(run("import os\nos._exit(0)")).contains("ended before its test"));
        assert!(failure(run("raise KeyboardInterrupt")).contains("KeyboardInterrupt"));
    }
}

#[test]
fn time_is_limited() {
    for sandbox in sandboxes() {
        let sandbox = Sandbox { limits: Limits { wall: Duration::from_millis(800), ..quick() }, ..sandbox };
        let started = Instant::now();
        assert_eq!(sandbox.run("import time\ntime.sleep(60)").expect("run"), Outcome::TimedOut);
        assert_eq!(sandbox.run("while True: pass").expect("run"), Outcome::TimedOut);
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn processor_time_is_limited_too() {
    for sandbox in sandboxes() {
        let limits = Limits { wall: Duration::from_secs(60), cpu_seconds: 1, ..quick() };
        let started = Instant::now();
        assert_eq!(Sandbox { limits, ..sandbox }.run("while True: pass").expect("run"), Outcome::TimedOut);
        assert!(started.elapsed() < Duration::from_secs(40));
    }
}

#[test]
fn memory_files_and_output_are_limited() {
    for sandbox in sandboxes() {
        let run = |program: &str| sandbox.run(program).expect("run");
        assert!(failure(run("x = bytearray(1 << 30)")).contains("MemoryError"));
        let large = "f = open('large', 'wb')\nfor _ in range(64): f.write(bytes(1 << 16))\nf.flush()";
        assert!(matches!(run(large), Outcome::Failed(_)));
        let talk =
            "import sys\nfor _ in range(20000): sys.stderr.write('x' * 100 + '\\n')\nassert False, 'last'";
        let said = failure(run(talk));
        assert!(said.len() <= 4096 && said.contains("last"), "{}", said.len());
        assert_eq!(run("for _ in range(20000): print('x' * 100)"), Outcome::Passed);
    }
}

#[test]
fn the_world_is_out_of_reach() {
    for sandbox in sandboxes() {
        let run = |program: &str| sandbox.run(program).expect("run");
        let connect = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)";
        assert!(failure(run(connect)).contains("Error"));
        for program in [
            "import subprocess\nsubprocess.run(['true'])",
            "import os\nos.system('true')",
            "import os\nos.fork()",
            "import os\nos.kill(os.getppid(), 0)",
            "open('/oscar-must-not-exist', 'w')",
            "open('../oscar-must-not-exist', 'w')",
            "import os\nos.mkdir('/oscar-must-not-exist')",
            "import os\nos.remove('/etc/hostname')",
            "import shutil\nshutil.rmtree('/etc')",
            "import ctypes\nctypes.CDLL('libc.so.6')",
        ] {
            assert!(failure(run(program)).contains("not allowed"), "{program}: {:?}", run(program));
        }
        assert!(!std::path::Path::new("/oscar-must-not-exist").exists());
        let own = "import os\nassert os.listdir('.') == []\nopen('own', 'w').write('x')\nos.remove('own')";
        assert_eq!(run(own), Outcome::Passed);
        let environment = "import os, sys\nassert set(os.environ) <= {'HOME','TMPDIR','LANG','PATH','LC_CTYPE'}, os.environ\nassert sys.stdin.read() == ''";
        assert_eq!(run(environment), Outcome::Passed);
    }
}

#[test]
fn a_namespace_has_no_network_at_all() {
    let Some(sandbox) = sandboxes().into_iter().find(|sandbox| sandbox.network() == Network::Namespace)
    else {
        return;
    };
    // Not through the guarded modules: the kernel lists the interfaces of the namespace.
    let program = "lines = open('/proc/self/net/dev').read().splitlines()[2:]\nassert len(lines) == 1 and 'lo:' in lines[0], lines";
    assert_eq!(sandbox.run(program).expect("run"), Outcome::Passed);
}
