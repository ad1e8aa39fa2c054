"""The words that a gap key may take from a shell command.

A command line holds passwords, tokens and names of customers, and keys are written to
files: what is not in these tables is `OTHER`, whatever it looks like.
"""

from __future__ import annotations

from ttlcache.toolcalls.base import words
from ttlcache.toolcalls.shell.programs import (
    INSTANT,
    MODE_FLAGS,
    NO_SUBCOMMAND,
    PREFIX_PAIRS,
    PREFIXES,
    SCRIPT_RUNNERS,
    SHELLS,
    VALUE_FLAGS,
    WRAPPERS,
)

#: The executable of every program that is not in `PROGRAMS`.
OTHER = "*"

PROGRAMS = (
    PREFIXES
    | INSTANT
    | NO_SUBCOMMAND
    | SCRIPT_RUNNERS
    | SHELLS
    | VALUE_FLAGS.keys()
    | MODE_FLAGS.keys()
    | {name for name, _ in PREFIX_PAIRS}
    | {names[0] for names in WRAPPERS}
    | words(
        """7z R aclocal act aider airflow alembic allure ansible ansible-playbook ant
        apk apt apt-cache apt-get aptitude ar arch argocd as asciidoctor autoconf
        automake autopep8 autoreconf aws az b2 babel bandit base32 base64 bats bazel
        bazelisk bc behave biome bison black bower brew browserslist buck2 buf
        buildah bun bundle bundler busybox bzip2 c++filt cabal cal calc cargo ccache
        celery certbot cfn-lint changeset chgrp chromium circleci cksum clang-format
        clang-tidy claude clojure cloc cmake-format cProfile codecov codesign codex
        composer conan conda configure convert coverage cpan cpanm cpio cppcheck
        cpplint crictl crontab csc csplit ctest ctags cucumber curlie cwebp cypress
        cython dart dask datamodel-codegen dbt debuild deno detox dig dir direnv
        django-admin dmesg dnf docker docker-compose docusaurus dotnet doxygen dune
        dvc dvipdf earthly eb electron elixir elm emacs emcc ember erl erlang
        esbuild exiftool expand expect expo factor fakeroot fallocate fastapi ffmpeg
        ffprobe firebase fish flask flatpak flex flock flutter flyctl fmt fold
        foreman forge free fsck ftp g77 gatsby gawk gcloud gcov gem gemini gettext
        getent gfortran gh ghc ghci git git-lfs gitlab gitleaks glab gnuplot go
        gofmt golangci-lint gotestsum gpg gprof gradle gradlew graphviz groovy
        grpcurl grunt gsutil gulp gunicorn gunzip hadolint haxe helm heroku hg host
        hostnamectl htop http httpie hugo http.server hyperfine iconv identify
        ifconfig initdb inkscape install invoke ip iptables ipython irb isort
        istioctl jar jasmine javadoc json.tool jekyll join journalctl jshell jupyter
        jupyter-lab jupyter-notebook just k3d k3s k6 k9s karma kaggle keytool
        killall kind knip ko kotlin kotlinc kubeadm kubectl kustomize lake last lcov
        ld ldconfig ldd lean leiningen lein lerna lighthouse lint-staged liquibase
        lldb llc locale locate locust logger lsb_release lscpu lsof ltrace luarocks
        luajit lynx lz4 lzma m4 magick mail make mamba maven md5 mdbook meson
        micromamba minikube mise mix mkdocs mkfifo mktemp mlflow modprobe mongo
        mongod mongosh mount mpirun msbuild msgfmt mvn mvnw mypyc mysqladmin
        mysqldump mysqld nasm nc ncat neofetch netcat netlify netstat newman next
        nextflow nginx ng nice ninja nm nmap nosetests nox npm npx nslookup nuget
        numfmt nuxt nvcc nvidia-smi nvm nvprof nx objcopy objdump ocaml ocamlfind oc
        od ollama opam openssl opa optipng oxlint packer pacman pandoc parallel
        parcel passwd patchelf pathchk pdb pdflatex pdftotext pdm perf pg_ctl
        pg_dump pg_restore pgbench pgrep phpcs phpstan phpunit ping pip pip-compile
        pip-sync pipenv pipx pixi pkg pkg-config playwright pm2 pmap pnpm podman
        poetry pr pre-commit prettier prisma promtool protoc prove ps2pdf psalm
        pstree pulumi puppet pushgateway pv pwsh py-spy pyenv pyinstaller pylama
        pypy pypy3 pyre pyright pytest-watch qemu-img qmake quarto quarkus rails
        rake ranlib rbenv rclone react-scripts readelf redis-cli redis-server redoc
        renice reset restic robot rollup rpm rspec rst2html rubocop rubygems rustfmt
        rustup rye sam sass sbt scala scalac scons scoop screen scrapy script
        semgrep sentry-cli serverless service setfacl sftp shasum shellcheck shfmt
        shred shuf skaffold slim snakemake snap snyk solc spack spark-submit
        sphinx-build split sqlfluff sqlx sqlcmd sqlmap ss ssh-add ssh-agent
        ssh-keygen ssh-keyscan sshpass stack standard stow strace streamlit strip
        stty stylelint su sum supabase supervisorctl svelte-kit svn swag swift
        swiftc swiftlint sync sysctl systemctl systemd-analyze tac task taskkill
        tauri tcpdump tectonic telnet terraform terragrunt tesseract tig timedatectl
        timeit tldr tmux tofu top tox tput traceroute trivy truffle trufflehog
        truncate ts-jest tsup tty turbo twine ty typst unexpand unittest units unrar
        unxz update-alternatives uptime useradd usermod uv uvicorn venv uvx v
        vagrant valgrind vault vercel vi virtualenv virsh vite vitepress vue
        vue-cli-service w waitress-serve wasm-pack watch watchman wat2wasm watchexec
        webpack wheel who wine wkhtmltopdf wrangler xcodebuild xcrun xelatex xz
        xzcat yamllint yapf yarn yq yt-dlp zcat zig zip zipinfo zls zola zstd"""
    )
)

#: Second words of any program that has subcommands, and targets of build tools.
SUBCOMMANDS = words(
    """access account activate add admin all am amend analyze annotate api app
    apply archive assemble attach audit auth autoremove bench benchmark bind
    bisect blame board branch browse build bundle cache cat certs check
    check-attr check-ignore checkout cherry-pick ci clean cleanup clear clippy
    clone cloudformation cluster cluster-info code codegen collectstatic commit
    compile compose completion component compute config configure connect
    console container containers context convert copy cordon cov cover coverage
    cp create create-react-app createsuperuser css current daemon-reload data db
    deactivate debug default delete deploy deployment deps describe destroy dev
    devices diagnose diff difftool disable dist distclean dlx doc docker docs
    doctor down download drain dump dump-config e2e ec2 ecr ecs edit eject eks
    enable env environment eslint eval events exec explain export expose fetch
    filter-branch find fix flake8 fmt format forward freeze fsck functions gc
    generate get gist grep groups gui head heads health help history hooks i18n
    iam image images import index info init inspect install install-deps
    integration integrationtest integration-test invoke issue jar join kernel
    key keys kill lab label lambda latest lfs lint list listen load lock log
    login logout logs ls ls-files ls-remote ls-tree machine makemigrations
    manifest merge merge-base mergetool metadata metrics migrate migration
    migrations mod model modules monitor mount mv name-rev namespace nbconvert
    network new node nodes notebook notes outdated output package packages pack
    patch pause pip plan plugin plugins pod pods port port-forward pr pre-commit
    preview process profile project projects proxy prune ps publish pull purge
    push python query rebase rebuild recipe reflog refresh register reinstall
    release reload remote remove rename repl replace repo report req genrsa x509
    dgst enc rand verify s_client reset resolve resource resources restart
    restore resume rev-list rev-parse revert rm rmi rollback rollout root route
    routes run rustc s3 s3api scale scan search secret secrets seed select self
    serve server service services session set setup shell shortlog show show-ref
    showmigrations site snapshot spec sparse-checkout stack start startapp
    startproject stash stat state stats status stop storage storybook sts
    submodule sum swagger switch symbolic-ref sync system tag tags target task
    tasks taint teardown template test test-integration test-unit tests tidy
    toolchain top trace train tree tunnel tutorial type-check typecheck types
    typescript uncordon undo uninstall unit unlink unlock unpack unpause
    unit-test untaint up update upgrade upload user users validate venv version
    versions vet view volume volumes wait watch which whoami why workflow
    workspace workspaces worktree wrapper write zip kill-server kill-session
    new-session send-keys capture-pane has-session list-sessions new-window
    split-window attach-session detach display-message list-windows load-buffer
    paste-buffer resize-window select-window set-option wait-for hash-object
    cat-file write-tree update-index update-ref bash java javac test-compile
    compileJava compileTestJava testClasses classes prepare prettier lint-fix
    precommit smoke regression simulate synth fuzz quality check-all checks
    ci-test"""
)

#: Of files: what follows the last dot of a name that is an argument or a script.
EXTENSIONS = words(
    """a adoc asm avi awk bak bash bat bin bmp bz2 c cc cfg cjs class clj cmd cnf
    coffee conf cpp crt cs csh css csv cts cu cuh cxx d dart dat db deb diff dll
    doc docx dot dts ejs el elf elm env eot eps erb erl ex exe exs f f90 fish
    flac fs fsx gdb gem gif go gpg gql gradle graphql groovy gz h haml hbs hcl
    hex hh hpp hs htm html hxx ico idx ini inl ino ipynb iso jar java jl jpeg
    jpg js json json5 jsonc jsonl jsp jsx key kt kts l less lean lib lisp lock
    log lua m m4 mako map markdown md mdx mjs mk ml mli mod mov mp3 mp4 mts
    mustache nim nix npy npz o obj odt ogg onnx orig otf out p12 pas patch pb
    pdf pem pgm php pickle pid pkl pl plist png po pony ppm ppt pptx prisma pro
    proto ps ps1 psv pt pth pub pug py pyc pyi pyx r rar rb rego rej rmd rpm rs
    rst rules s safetensors sass scala scm scss sh slim sln so sol sql sqlite
    srt styl sum svelte svg swift swp t tar tcl tex tf tfvars tgz thrift tif
    tiff tmp toml ts tsv tsx ttf txt v vb vue wasm wat wav webm webp whl woff
    woff2 wsdl xls xlsx xml xsd xsl xz y yaml yml zig zip zsh zst"""
)
