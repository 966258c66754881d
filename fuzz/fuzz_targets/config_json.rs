//! A configuration of any bytes is refused or read; no field of it can make a getter panic.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use oscar_model::files::{Fields, JsonFile};

fn read_all(fields: &Fields<'_>) {
    for name in fields.object().keys() {
        let _ = fields.positive(name);
        let _ = fields.float(name);
        let _ = fields.bool_if_present(name);
        let _ = fields.str(name);
        let _ = fields.strings_if_present(name);
        let _ = fields.token_ids_if_present(name);
        if let Ok(Some(nested)) = fields.fields_if_present(name) {
            read_all(&nested);
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(file) = JsonFile::parse(bytes, Path::new("fuzz.json")) {
        read_all(&file.fields());
    }
});
