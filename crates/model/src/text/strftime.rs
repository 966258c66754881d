//! `strftime_now`: a few templates write the date. The clock is UTC, so a prompt does not depend on the
//! machine's time zone.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats a time with the directives of C's `strftime` that templates use; unknown ones stay as written.
pub(super) fn strftime(format: &str, time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let weekday = ((days + 4) % 7) as usize;
    let (year, month, day, day_of_year) = civil(days);
    let month_name = MONTHS[month as usize - 1];
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };

    let mut out = String::with_capacity(format.len() + 16);
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let two = |value: u64| if padded { format!("{value:02}") } else { value.to_string() };
        match directive {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&two(year % 100)),
            Some('m') => out.push_str(&two(month)),
            Some('d') => out.push_str(&two(day)),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('j') => out.push_str(&format!("{day_of_year:03}")),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(DAYS[weekday]),
            Some('a') => out.push_str(&DAYS[weekday][..3]),
            Some('H') => out.push_str(&two(hour)),
            Some('I') => out.push_str(&two(hour12)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('M') => out.push_str(&two(minute)),
            Some('S') => out.push_str(&two(second)),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('%') => out.push('%'),
            Some(other) => {
                out.push('%');
                out.push(other);
            }
            None => out.push('%'),
        }
    }
    out
}

/// Year, month, day and day of the year of a day counted from 1970-01-01, proleptic Gregorian.
fn civil(days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    // 400 years always have 146097 days, so the loop below walks at most 400 years.
    let mut year = 1970 + 400 * (days / 146_097);
    let mut rest = days % 146_097;
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if rest < length {
            break;
        }
        rest -= length;
        year += 1;
    }
    let day_of_year = rest + 1;
    let february = if leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month, rest + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_as_c_writes_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        // Expected values from Python's datetime.
        assert_eq!(strftime("%d %b %Y", at(1_721_952_000)), "26 Jul 2024");
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S %A %j", at(951_827_696)), "2000-02-29 12:34:56 Tuesday 060");
        assert_eq!(strftime("%-d/%-m %I%p %B %% %q", at(1_735_603_200)), "31/12 12AM December % %q");
        assert_eq!(strftime("%F", at(4_102_444_800)), "2100-01-01");
        assert_eq!(strftime("%F %", at(0)), "1970-01-01 %");
    }
}
