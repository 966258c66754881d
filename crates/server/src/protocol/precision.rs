//! How exactly the history of a request is kept: `kv_precision` and `kv_demote`.

use oscar_engine::{EngineInfo, GenerateOptions, Tier};
use serde_json::Value;

use super::{ApiError, says_nothing};
use crate::tiers::offered;

/// The fields of a request about the precision of its history.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrecisionFields {
    pub(crate) kv_precision: Option<Value>,
    pub(crate) kv_demote: Option<bool>,
}

impl PrecisionFields {
    /// The options with what the fields ask for, if the engine offers it.
    pub(crate) fn apply(
        &self,
        info: &EngineInfo,
        options: GenerateOptions,
    ) -> Result<GenerateOptions, ApiError> {
        let tier = match self.kv_precision.as_ref().filter(|wanted| !says_nothing(wanted)) {
            None => Tier::Sealed,
            Some(wanted) => {
                let found = offered(info).find(|offered| wanted == offered.name);
                found.ok_or_else(|| not_offered(wanted, info))?.tier
            }
        };
        Ok(GenerateOptions { tier, demote: self.kv_demote.unwrap_or(false), ..options })
    }
}

fn not_offered(wanted: &Value, info: &EngineInfo) -> ApiError {
    let own = &info.kv;
    let fix = match wanted.as_str() {
        Some("bf16") => format!("; --kv-tiers {own},bf16 adds it"),
        Some("high") if own == "int2" => "; --kv-tiers int2,high adds it".to_owned(),
        Some("high") => "; there is such a tier beside --kv-cache-dtype int2 only".to_owned(),
        _ => String::new(),
    };
    let offered: Vec<String> = offered(info).map(|offered| format!("{:?}", offered.name)).collect();
    let message = format!("kv_precision must be absent or {}{fix}", offered.join(" or "));
    ApiError::unsupported("kv_precision", message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ask(precision: Value, bf16_context: Option<usize>) -> Result<Tier, String> {
        ask_of(EngineInfo { kv: "int2".to_owned(), bf16_context, ..EngineInfo::default() }, precision)
    }

    fn ask_of(info: EngineInfo, precision: Value) -> Result<Tier, String> {
        let fields = PrecisionFields { kv_precision: Some(precision), kv_demote: None };
        let options = fields.apply(&info, GenerateOptions::default());
        options.map(|options| options.tier).map_err(|error| error.to_string())
    }

    #[test]
    fn a_precision_must_be_offered() {
        for own in [Value::Null, json!("int2")] {
            assert_eq!(ask(own.clone(), None), Ok(Tier::Sealed));
            assert_eq!(ask(own, Some(100)), Ok(Tier::Sealed));
        }
        assert_eq!(ask(json!("bf16"), Some(100)), Ok(Tier::Exact));
        assert!(ask(json!("bf16"), None).unwrap_err().contains("--kv-tiers int2,bf16"));
        assert!(ask(json!("high"), Some(100)).unwrap_err().contains("--kv-tiers int2,high"));
        let high = |kv: &str, high_context| {
            ask_of(EngineInfo { kv: kv.to_owned(), high_context, ..EngineInfo::default() }, json!("high"))
        };
        assert_eq!(high("int2", Some(100)), Ok(Tier::High));
        assert!(high("int4", None).unwrap_err().contains("beside --kv-cache-dtype int2 only"));
        let other = ask(json!("fp8"), Some(100)).unwrap_err();
        assert!(other.contains("\"int2\" or \"bf16\""), "{other}");
        assert!(ask(json!(16), Some(100)).is_err());
    }

    #[test]
    fn an_exact_cache_has_no_other_tier() {
        let info = EngineInfo { kv: "bf16".to_owned(), ..EngineInfo::default() };
        let fields = PrecisionFields { kv_precision: Some(json!("bf16")), kv_demote: Some(true) };
        let options = fields.apply(&info, GenerateOptions::default()).unwrap();
        // The engine refuses what cannot be demoted.
        assert_eq!((options.tier, options.demote), (Tier::Sealed, true));
    }
}
