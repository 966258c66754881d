//! A CUDA driver and run-time compiler without a card, so that the host's side of the CUDA backend is tested on any machine.
//!
//! `libcuda.so` and `libnvrtc.so` may be links to this library (`.ci/fake-card` makes them). It has what `oscar-kernels` calls and
//! nothing more; a call of anything else ends with the name of what is missing. Kernels are plain loops in Rust, one for each
//! `__global__` function that is covered, and any other is refused by name when it is loaded.
//!
//! What it is strict about, so that mistakes of the host show:
//!
//! * A *module* is the source with its macros. The layout of a kernel's argument and of the tables it reads is taken from the
//!   `struct`s of that source (`source`), so the structs of the host must agree with those of the kernels.
//! * *Device memory* (`memory`) has addresses of its own that are never given twice. Whatever touches memory that is not there
//!   any more, or reaches beyond an allocation, is an illegal address. New memory is full of ones (NaN as a float).
//! * A *stream* (`stream`) does nothing before somebody waits for it, so that whoever reads a result too early, or changes pinned
//!   memory too early, finds out. Recorded launches keep the bytes of their arguments and read everything else when they run.
//!
//! | module | job |
//! |---|---|
//! | `exports` | the functions of both libraries |
//! | `memory`, `stream`, `module`, `function` | what these work on |
//! | `source` | macros and structs of kernel sources |
//! | `call` | what a kernel is given |
//! | `pages` | the order of pages that a source describes |
//! | `kernels` | what each kernel computes |
//! | `settings` | the card, and faults that are asked for |

// It is all about memory that others name by address.
#![allow(unsafe_code)]

mod call;
mod exports;
mod function;
mod kernels;
mod memory;
mod module;
mod pages;
mod settings;
mod source;
mod stream;
