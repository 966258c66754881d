//! Keys and numbers: pairs of an adjective and a noun, and digits that occur nowhere else.

use std::collections::HashSet;

use oscar_random::Random;

use super::{NeedleError, NeedleKind, NeedleOptions};

const ADJECTIVES: &[&str] = &[
    "crimson",
    "amber",
    "violet",
    "silver",
    "turquoise",
    "ivory",
    "scarlet",
    "copper",
    "emerald",
    "golden",
    "indigo",
    "maroon",
    "cobalt",
    "bronze",
    "lavender",
    "olive",
    "coral",
    "azure",
    "charcoal",
    "magenta",
    "frozen",
    "hidden",
    "wooden",
    "velvet",
    "marble",
    "paper",
    "crystal",
    "woollen",
    "tropical",
    "lunar",
    "solar",
    "electric",
    "magnetic",
    "spiral",
    "striped",
    "spotted",
    "invisible",
    "portable",
    "floating",
    "whispering",
    "roaming",
    "sleeping",
];

const NOUNS: &[&str] = &[
    "lantern",
    "falcon",
    "glacier",
    "trumpet",
    "pyramid",
    "saddle",
    "walnut",
    "dragon",
    "volcano",
    "umbrella",
    "comet",
    "anvil",
    "peacock",
    "scorpion",
    "cathedral",
    "dolphin",
    "tunnel",
    "helmet",
    "orchid",
    "canyon",
    "sphinx",
    "turbine",
    "penguin",
    "bracelet",
    "hurricane",
    "locomotive",
    "mushroom",
    "parachute",
    "quartz",
    "rhinoceros",
    "satellite",
    "tortoise",
    "vampire",
    "waterfall",
    "xylophone",
    "zeppelin",
    "balloon",
    "cactus",
    "dinosaur",
    "elevator",
    "fountain",
    "gargoyle",
];

/// Most keys of one prompt: of 42 adjectives and as many nouns, distractors use half as many each.
pub(super) const MOST_KEYS: usize = 64;

/// Most numbers under one key.
pub(super) const MOST_VALUES: usize = 64;

/// Numbers drawn before a text is taken to hold them all.
const MOST_TRIES: usize = 2000;

/// A key with its numbers.
#[derive(Clone, Debug)]
pub(super) struct Needle {
    pub(super) key: String,
    pub(super) values: Vec<String>,
}

impl Needle {
    /// One sentence per number.
    pub(super) fn sentences(&self) -> Vec<String> {
        let sentence = |value: &String| format!("The secret code of the {} is {value}.", self.key);
        self.values.iter().map(sentence).collect()
    }
}

/// Draws the asked needle first, then the others. `taken` says whether the haystack already contains a number.
pub(super) fn needles(
    options: &NeedleOptions,
    random: &mut Random,
    taken: &dyn Fn(&str) -> bool,
) -> Result<Vec<Needle>, NeedleError> {
    let keys = match options.kind {
        NeedleKind::Single | NeedleKind::MultiValue => 1,
        NeedleKind::MultiKey | NeedleKind::Distractors => options.keys,
    };
    let values = if options.kind == NeedleKind::MultiValue { options.values } else { 1 };
    if !(1..=MOST_KEYS).contains(&keys) {
        return Err(NeedleError::Count { what: "keys", count: keys, most: MOST_KEYS });
    }
    if !(1..=MOST_VALUES).contains(&values) {
        return Err(NeedleError::Count { what: "values", count: values, most: MOST_VALUES });
    }
    // Three digits leave 900 numbers for at most 64 needles; more than 18 do not fit the arithmetic.
    if !(3..=18).contains(&options.digits) {
        return Err(NeedleError::Digits { digits: options.digits });
    }
    let mut used = HashSet::new();
    let asked = (random.below(ADJECTIVES.len()), random.below(NOUNS.len()));
    let mut pairs = vec![asked];
    used.insert(asked);
    while pairs.len() < keys {
        let pair = match options.kind {
            // Turn about the same noun and the same adjective.
            NeedleKind::Distractors if pairs.len() % 2 == 1 => (random.below(ADJECTIVES.len()), asked.1),
            NeedleKind::Distractors => (asked.0, random.below(NOUNS.len())),
            _ => (random.below(ADJECTIVES.len()), random.below(NOUNS.len())),
        };
        // Other keys of a multi-key prompt share no word with the asked one; that is what distractors are for.
        let alike = options.kind == NeedleKind::MultiKey && (pair.0 == asked.0 || pair.1 == asked.1);
        if !alike && used.insert(pair) {
            pairs.push(pair);
        }
    }
    let mut numbers: Vec<String> = Vec::new();
    for index in 0..keys.max(values) {
        let alike = options.kind == NeedleKind::Distractors && index % 2 == 1;
        let mut tries = (0..MOST_TRIES).map(|_| match numbers.first() {
            Some(first) if alike => altered(first, random),
            _ => number(options.digits, random),
        });
        let free = tries.find(|number| !numbers.contains(number) && !taken(number));
        numbers.push(free.ok_or(NeedleError::NoFreeNumber { digits: options.digits })?);
    }
    let key = |(adjective, noun): (usize, usize)| format!("{} {}", ADJECTIVES[adjective], NOUNS[noun]);
    if values > 1 {
        return Ok(vec![Needle { key: key(asked), values: numbers }]);
    }
    let needle = |(pair, number)| Needle { key: key(pair), values: vec![number] };
    Ok(pairs.into_iter().zip(numbers).map(needle).collect())
}

/// A number without a leading zero, so that it is the same number however it is written.
fn number(digits: usize, random: &mut Random) -> String {
    let mut text = String::with_capacity(digits);
    text.push(char::from(b'1' + random.below(9) as u8));
    text.extend((1..digits).map(|_| char::from(b'0' + random.below(10) as u8)));
    text
}

/// The same number but for two of its digits, or one.
fn altered(number: &str, random: &mut Random) -> String {
    let mut digits = number.as_bytes().to_vec();
    for _ in 0..2 {
        let place = 1 + random.below(digits.len() - 1);
        digits[place] = b'0' + random.below(10) as u8;
    }
    digits.into_iter().map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(kind: NeedleKind, seed: u64) -> Vec<Needle> {
        let options = NeedleOptions { kind, ..NeedleOptions::default() };
        needles(&options, &mut Random::new(seed), &|_| false).expect("needles")
    }

    #[test]
    fn each_kind_has_its_shape() {
        assert_eq!(draw(NeedleKind::Single, 1).len(), 1);
        assert_eq!(draw(NeedleKind::MultiKey, 1).len(), 8);
        assert_eq!(draw(NeedleKind::Distractors, 1).len(), 8);
        let several = draw(NeedleKind::MultiValue, 1);
        assert_eq!((several.len(), several[0].values.len()), (1, 4));
    }

    #[test]
    fn keys_and_numbers_are_distinct() {
        for (seed, kind) in (0..200).flat_map(|seed| NeedleKind::ALL.map(|kind| (seed, kind))) {
            let needles = draw(kind, seed);
            let keys: HashSet<&str> = needles.iter().map(|needle| needle.key.as_str()).collect();
            assert_eq!(keys.len(), needles.len());
            let values: Vec<&String> = needles.iter().flat_map(|needle| &needle.values).collect();
            assert_eq!(values.iter().collect::<HashSet<_>>().len(), values.len());
            assert!(values.iter().all(|value| value.len() == 7 && !value.starts_with('0')));
        }
    }

    #[test]
    fn distractors_share_a_word_and_other_keys_none() {
        for seed in 0..50 {
            let alike = |needles: Vec<Needle>| {
                let words: Vec<Vec<String>> =
                    needles.iter().map(|needle| needle.key.split(' ').map(str::to_owned).collect()).collect();
                words[1..].iter().filter(|other| other.iter().any(|word| words[0].contains(word))).count()
            };
            assert_eq!(alike(draw(NeedleKind::Distractors, seed)), 7);
            assert_eq!(alike(draw(NeedleKind::MultiKey, seed)), 0);
        }
    }

    #[test]
    fn half_of_the_distractors_share_digits_with_the_answer() {
        let needles = draw(NeedleKind::Distractors, 4);
        let close = |needle: &&Needle| {
            let pairs = needle.values[0].bytes().zip(needles[0].values[0].bytes());
            pairs.filter(|(one, other)| one == other).count() >= 5
        };
        assert!(needles[1..].iter().filter(close).count() >= 4);
    }

    #[test]
    fn numbers_of_the_haystack_are_avoided() {
        let options = NeedleOptions { digits: 3, ..NeedleOptions::default() };
        let odd = |number: &str| number.ends_with(['1', '3', '5', '7', '9']);
        for seed in 0..50 {
            let needles = needles(&options, &mut Random::new(seed), &odd).expect("needles");
            assert!(!odd(&needles[0].values[0]));
        }
    }

    #[test]
    fn a_text_that_holds_every_number_is_refused() {
        let error =
            needles(&NeedleOptions::default(), &mut Random::new(1), &|_| true).expect_err("none is free");
        assert_eq!(error, NeedleError::NoFreeNumber { digits: 7 });
    }

    #[test]
    fn impossible_counts_are_refused() {
        let random = &mut Random::new(0);
        let base = NeedleOptions { kind: NeedleKind::MultiKey, ..NeedleOptions::default() };
        for keys in [0, MOST_KEYS + 1] {
            let error = needles(&NeedleOptions { keys, ..base }, random, &|_| false).expect_err("keys");
            assert!(matches!(error, NeedleError::Count { what: "keys", .. }), "{error}");
        }
        for digits in [0, 2, 19] {
            let error = needles(&NeedleOptions { digits, ..base }, random, &|_| false).expect_err("digits");
            assert_eq!(error, NeedleError::Digits { digits });
        }
        for kind in NeedleKind::ALL {
            let most = NeedleOptions { kind, keys: MOST_KEYS, values: MOST_VALUES, digits: 3, ..base };
            assert!(needles(&most, random, &|_| false).is_ok(), "{kind}");
        }
    }
}
