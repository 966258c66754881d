use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;

use clap::Parser;
use oscar_engine::EngineOptions;
use oscar_rotations::ModelIdentity;
use oscar_testing::{HashBackend, tiny_model};

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    http: HttpArguments,
}

/// A request for more tokens than come before the device is lost, on a connection of its own.
fn ask(address: SocketAddr) -> String {
    let body = r#"{"prompt": [3, 4, 5], "max_tokens": 4000, "ignore_eos": true, "stream": true}"#;
    let mut stream = loop {
        // The server has its port before it listens.
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_server_whose_device_fails_ends_with_a_failure() {
    let backend = Arc::new(HashBackend::default());
    let model = tiny_model(8192, Arc::clone(&backend));
    let engine = Arc::new(Engine::new(Arc::clone(&model), &EngineOptions::default()).unwrap());
    let (model_fingerprint, weight_fingerprint) = (String::new(), String::new());
    let identity = ModelIdentity { name: "tiny".to_owned(), model_fingerprint, weight_fingerprint };
    let subject = NamedModel { model, identity, weight_bytes: 0, random: false, slice: None };
    let Line { http } = Line::parse_from(["oscar", "--port", "0"]);
    let listener = http.open().unwrap();
    let address = listener.socket.local_addr().unwrap();
    backend.lose_after(Some(500));
    let client = std::thread::spawn(move || ask(address));

    let failure = http.serve(listener, &subject, engine, None).unwrap_err();

    let answer = client.join().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let reason = "the device failed: the device is lost: injected fault: Device";
    assert!(answer.contains(reason), "{answer}");
    let Failure::Error { message, fix } = &failure else { panic!("{failure:?}") };
    assert!(message.starts_with(reason), "{message}");
    assert!(fix.as_ref().is_some_and(|fix| fix.contains("start it again")), "{fix:?}");
    assert_eq!(failure.report(), ExitCode::FAILURE);
}
