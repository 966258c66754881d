//! An index of any bytes is refused or names only files of its own folder.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use oscar_model::files::safetensors::parse_index;

fuzz_target!(|bytes: &[u8]| {
    let Ok(weight_map) = parse_index(bytes, Path::new("fuzz.index.json")) else { return };
    for file in weight_map.values() {
        assert_eq!(Path::new("folder").join(file).parent(), Some(Path::new("folder")));
    }
});
