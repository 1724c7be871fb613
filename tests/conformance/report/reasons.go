package report

import (
	"bufio"
	"os"
	"regexp"
	"strings"
)

var (
	// testLine names the test to which the log's next lines belong.
	testLine = regexp.MustCompile(`^=== (?:RUN|NAME|CONT)\s+\w+/([^/\s]+)`)
	// nextLine announces a reason on the next line.
	nextLine = regexp.MustCompile(`Error:\s+Received unexpected error:$`)
	// reasonLine is a line by which the suite says why a check failed, without its repetitions' times.
	reasonLine = regexp.MustCompile(`(?:not ready yet: |Error:\s+|failed: )(.*?)(?: \(after [^)]*\))?$`)
)

// AddReasons puts the last reason that the suite's log has for a failed test before the one that it has.
func AddReasons(outcomes []Outcome, logPath string) error {
	log, err := os.Open(logPath)
	if err != nil {
		return err
	}
	defer log.Close()
	reasons := map[string]string{}
	name := ""
	lines := bufio.NewScanner(log)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		if found := testLine.FindStringSubmatch(lines.Text()); found != nil {
			name = found[1]
		} else if nextLine.MatchString(lines.Text()) && lines.Scan() {
			reasons[name] = strings.TrimSpace(lines.Text())
		} else if found := reasonLine.FindStringSubmatch(lines.Text()); found != nil {
			reasons[name] = strings.TrimSpace(found[1])
		}
	}
	for i, o := range outcomes {
		found := reasons[o.Test.ShortName]
		switch {
		case o.Verdict != Failed || found == "":
		case o.Reason == "":
			outcomes[i].Reason = found
		default:
			outcomes[i].Reason = found + "; " + o.Reason
		}
	}
	return lines.Err()
}
